"""The walk through what a forward may depend on besides its arguments: the state of the model and of what its
code reads.

One walk, with a visitor for each purpose: fingerprints compare by identity at every call, and records tell
whether another walk would read the same (`fingerprint.py`), contents compare in another process
(`content.py`), snapshots put back what a trace changed (`snapshot.py`), and differences are named
(`capture/guards.py`). What counts is decided here, by a scope, and nowhere else.
"""

import functools
import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import _AttrProxy

from attngraph.capture.state import kinds as K
from attngraph.capture.state.kinds import Place
from attngraph.ir import budgets

from attngraph.capture.state.scope import (  # isort: skip
    BUILT_IN, EVERYTHING, Scope, Space, functions_of, nested, surrounding,
)  # fmt: skip

_OPENED: tuple[tuple[Any, str], ...] = (
    (nn.Module, "module"), (type, "kind"), (types.ModuleType, "file"), (K.CONTAINERS, "container"),
    (types.FunctionType, "function"), (types.MethodType, "method"), (types.BuiltinFunctionType, "built_in"),
    (K.WRAPPERS, "wrapper"), (ContextVar, "variable"), (K.VIEWS, "view"), (object, "thing"),
)  # fmt: skip
"""The kinds of things that have parts, and what visits these."""


@functools.lru_cache(maxsize=4096)
def _opened_by(kind: type, told: type) -> str:
    """What visits the parts of objects of a class, which may say that they are of another, as proxies do."""
    return next(name for kinds, name in _OPENED if issubclass(kind, kinds) or issubclass(told, kinds))


class Walk:
    """Visits values and what they hold. What a visitor notes of each is in the methods below `visit`.

    Attributes:
        at: the attribute or variable that is visited.
        unseen: what code that ran names and nobody can watch, with where it is and why.
    """

    def __init__(self, scope: Scope = EVERYTHING) -> None:
        self.scope = scope
        self.codes = set(scope.codes or ())
        self.at = Place(None, "")
        self.unseen: list[tuple[Place, Any, str]] = []
        self.seen: dict[int, int] = {}
        self.made: list[Any] = []
        """Containers that exist for the walk alone; their addresses stay their own."""
        self.met: set[int] = set()
        """The codes of the functions that were opened."""
        self.closed: dict[int, list[types.FunctionType]] = {}
        """Functions that were not, by their code."""
        self.kinds: set[type] = set()

    def everything(self, targets: Iterable[Any]) -> None:
        """Visit the targets, and all that code that ran can read by name."""
        for target in targets:
            self.start(target)
        for other in self.scope.others:
            self.start(other)
        with torch._C.DisableTorchFunction():
            for space, names in self.scope.spaces:
                self.variables(space, names)
            self.environment(self.scope.environment)

    def start(self, target: Any) -> None:
        """Visit a target, whose own code counts as code that ran."""
        self.at = Place(target, "")
        self.codes.update(id(f.__code__) for f in functions_of(target))
        with torch._C.DisableTorchFunction():  # a trace would look at each attribute of a tensor that is read
            self.visit(target, 0)

    def unseen_at_last(self) -> tuple[Place, Any, str] | None:
        """What nobody can watch, the first of it, once everything has been visited: what is nested too deeply
        may have been met elsewhere."""
        return next((f for f in self.unseen if f[2] != K.TOO_DEEP or id(f[1]) not in self.seen), None)

    def functions_not_met(self, codes: Iterable[types.CodeType]) -> frozenset[types.FunctionType]:
        """The functions that ran, have variables of their own around them, and were not met; but for those
        that code that ran made itself. A library may keep them where no walk leads."""
        codes = list(codes)
        found = self.met | {id(part) for code in codes for part in nested(code) if part is not code}
        lost = [c for c in codes if c.co_freevars not in ((), ("__class__",)) and id(c) not in found]
        held = (f for c in lost for f in gc.get_referrers(c) if isinstance(f, types.FunctionType))
        return frozenset(f for f in held if any(f.__code__ is c for c in lost))

    def visit(self, value: Any, depth: int) -> None:
        if isinstance(value, K.BY_VALUE):
            self.plain(value)
        elif isinstance(value, Tensor):
            self.tensor(value)
            self.attributes_of_tensor(value, depth)
        elif isinstance(value, weakref.ref):
            self.referred(value)
            self.visit(value(), depth)
        elif isinstance(value, _AttrProxy):
            self.visit(value.get_base(), depth)  # type: ignore[attr-defined]
        elif id(value) in self.seen:
            self.again(value)
        elif depth > budgets.STATE_DEPTH:
            self.hidden(value, K.TOO_DEEP)
        else:
            self.seen[id(value)] = len(self.seen)
            getattr(self, _opened_by(type(value), value.__class__))(value, depth + 1)  # type: ignore[arg-type]

    def child(self, step: str, value: Any, depth: int) -> None:
        """Visit something inside of what is being visited; `step` says which part of it."""
        self.visit(value, depth)

    def held_by(self, owner: Any, named: Iterable[tuple[str, Any]], depth: int) -> None:
        """Visit attributes or variables of an owner, by their names."""
        around = self.at
        for name, value in named:
            self.at = Place(owner, name)
            self.child(name, value, depth)
        self.at = around

    # --- what has parts ---

    def module(self, module: nn.Module, depth: int) -> None:
        own, left_out = vars(module), self.scope.left_out
        self.head(module)
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if (id(module), name) not in left_out:
                    self.weight(module, name, tensor)
                    if tensor is not None:
                        self.attributes_of_tensor(tensor, depth)
        self.kind(type(module), depth)
        hooks = ((name, hook) for name in K.HOOKS for hook in tuple(own[name].values()))
        self.held_by(module, hooks, depth)
        names = K.set_by_user(tuple(own))
        ordered = names if not K.ORDER.isdisjoint(self.scope.names) else sorted(names)
        # Another thread's call may have removed an attribute.
        counting = ((n, own.get(n)) for n in ordered if (id(module), n) not in left_out)
        self.held_by(module, counting, depth)
        for name, child in tuple(module._modules.items()):
            self.child(name, child, depth)

    def attributes_of_tensor(self, tensor: Tensor, depth: int) -> None:
        held = K.own_attributes(tensor)
        if held:
            self.made.append(held)
            self.child("__dict__", held, depth)

    def method(self, value: types.MethodType, depth: int) -> None:
        self.child("__func__", value.__func__, depth)
        self.child("__self__", value.__self__, depth)

    def built_in(self, value: types.BuiltinFunctionType, depth: int) -> None:
        self.same(value)
        if not isinstance(value.__self__, (types.ModuleType, type, types.NoneType)):
            self.child("__self__", value.__self__, depth)

    def variable(self, value: ContextVar[Any], depth: int) -> None:
        self.context(value)
        self.child("get", value.get(None), depth)

    def view(self, value: Any, depth: int) -> None:
        self.made.append(list(value))
        self.container(self.made[-1], depth)

    def thing(self, value: Any, depth: int) -> None:
        """An object: by its attributes if they are its whole state, by its value if it has one."""
        kind: Any = type(value)
        names = K.slots_of(kind)
        held = getattr(value, "__dict__", None)
        if K.is_fixed(value):
            self.same(value)
        elif K.is_mute(kind):
            self.mute(value)
        elif K.state_of_generator(value) is not None:
            self.generator(value)
        elif not K.is_open(kind) or (held is None and not names):
            self.closed_thing(value)
        else:
            if isinstance(value, partial):
                for step in ("func", "args", "keywords"):
                    self.child(step, getattr(value, step), depth)
            self.attributes(value, names, held or {}, depth)

    def attributes(self, value: Any, slots: Iterable[str], held: dict[str, Any], depth: int) -> None:
        """What an object has, and what its class does with it."""
        kind: Any = type(value)
        self.opened(value)
        self.kind(kind, depth)
        self.held_by(value, ((name, getattr(value, name, K.MISSING)) for name in slots), depth)
        passing, left_out, items = K.set_on_entry(kind), self.scope.left_out, tuple(held.items())
        counting = ((n, v) for n, v in items if n not in passing and (id(value), n) not in left_out)
        self.held_by(value, counting, depth)

    def closed_thing(self, value: Any) -> None:
        """An object that cannot be opened: by its value or its bytes. One without either may change
        unseen."""
        if isinstance(value, slice) or K.has_value(value):
            self.valued(value)
            return
        size = K.size_of(value)
        if size < 0:
            self.hidden(value, "nobody can see its state")
        elif size <= budgets.STATE_BYTES or self.scope.reads(self.at.name):
            self.buffer(value)
        else:
            self.same(value)

    def kind(self, kind: type, depth: int) -> None:
        """A class, with what its objects read of it."""
        self.same(kind)
        for owner in kind.__mro__:
            if owner not in self.kinds:
                self.kinds.add(owner)
                self.held_by(owner, self.members(owner), depth)
        if K.own_classes(type(kind)):
            self.kind(type(kind), depth)

    def members(self, owner: type) -> Iterator[tuple[str, Any]]:
        """The attributes of a class that count: its code, and what code that ran names. Of torch's modules,
        their forward, which users replace."""
        if K.is_known(K.module_of(owner)):
            if issubclass(owner, nn.Module) and "forward" in vars(owner):
                yield "forward", vars(owner)["forward"]
            return
        for name, value in tuple(vars(owner).items()):
            is_code = isinstance(value, (types.FunctionType, *K.WRAPPERS))
            is_slot = isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))
            if name not in K.OF_EVERY_CLASS and not is_slot and (is_code or self.scope.reads(name)):
                yield name, value

    def wrapper(self, value: Any, depth: int) -> None:
        """What a decorator of Python's makes of a function."""
        self.same(value)
        for part in K.wrapped_by(value):
            self.child("", part, depth)

    def container(self, value: Any, depth: int) -> None:
        if value is BUILT_IN:
            self.same(value)
            return
        entries: Any = value
        if isinstance(value, (dict, types.MappingProxyType)):
            entries = [(key, inner) for key, inner in value.items() if not K.is_of_stand_ins(key)]
        self.length(value, len(entries))
        if len(value) > budgets.STATE_ENTRIES and not self.scope.reads(self.at.name):
            self.same(value)
        elif len(value) > budgets.STATE_ENTRIES_READ:
            self.hidden(value, "it has too many entries")
        elif isinstance(value, (dict, types.MappingProxyType)):
            for number, (key, inner) in enumerate(entries):
                self.child(f"[key {number}]", key, depth)
                self.child(f"[{key if isinstance(key, str) else number}]", inner, depth)
        else:
            is_set = isinstance(value, (set, frozenset))
            if is_set:
                self.members_of_set(value)
            for number, inner in enumerate(tuple(value)):
                if not is_set or not isinstance(inner, (*K.BY_VALUE, type)):
                    self.child(f"[{number}]", inner, depth)
        if K.own_classes(type(value)):  # type: ignore[arg-type]
            self.attributes(value, (), getattr(value, "__dict__", {}), depth)

    def function(self, function: types.FunctionType, depth: int) -> None:
        """A function, and the attributes that users put on one that is no method; if its code counts, also
        its closure and its defaults. So does what a library's decorator makes of a function, which it has in
        its closure."""
        self.same(function)
        decorates = function.__closure__ and K.is_known(str(function.__globals__.get("__name__")))
        if decorates or id(function.__code__) in self.codes:
            self.inside_of(function, depth)
            return
        self.closed.setdefault(id(function.__code__), []).append(function)
        if not isinstance(self.at.owner, type):
            self.read_function(function)
            if function.__dict__:
                self.child("__dict__", function.__dict__, depth)

    def inside_of(self, function: types.FunctionType, depth: int) -> None:
        self.met.add(id(function.__code__))
        self.read_function(function)
        for name in ("__dict__", "__defaults__", "__kwdefaults__"):
            if held := getattr(function, name):
                self.child(name, held, depth)
        around = self.at
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.at = Place(function, name)
            self.child(f"<{name}>", K.inside(cell), depth)
        self.at = around

    def variables(self, space: Space, names: Iterable[str]) -> None:
        """Variables by their names. Of torch's files and Python's own, which object each is; by its value, if
        it is a number, a text, or a container of such (`sys.argv`)."""
        known = K.is_known(space.name)
        self.read_variables(space, names)
        for name in names:
            self.at = Place(space, name)
            value = space.get(name)
            theirs = known and K.is_known(str(getattr(value, "__module__", None) or space.name))
            if theirs and not K.is_plain(value):
                self.same(value)
            else:
                self.child(name, value, 0)

    def file(self, module: types.ModuleType, depth: int) -> None:
        """A file that an attribute or a variable holds: what it has under the names that code uses."""
        self.same(module)
        space = Space(vars(module))
        names = sorted(name for name in self.scope.names if name in space.held)
        if names and not K.is_known(module.__name__):
            self.read_variables(space, names)
            self.held_by(space, ((name, space.get(name)) for name in names), depth)

    # --- what visitors note ---

    def plain(self, value: Any) -> None:
        """A number, a text, a dtype."""

    def tensor(self, value: Tensor) -> None:
        """A tensor that is no weight of a module."""

    def weight(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        """A parameter or a buffer."""

    def head(self, module: nn.Module) -> None:
        """A module."""

    def opened(self, value: Any) -> None:
        """An object whose attributes follow."""

    def same(self, value: Any) -> None:
        """Something that is told by its identity: a class, a function, a file, a constant."""

    def valued(self, value: Any) -> None:
        """An object that is told by its value."""

    def buffer(self, value: Any) -> None:
        """An object that is told by its bytes."""

    def length(self, value: Any, entries: int) -> None:
        """A container whose entries follow."""

    def members_of_set(self, value: Any) -> None:
        """The members of a set, which have no order."""

    def again(self, value: Any) -> None:
        """What was visited before."""

    def mute(self, value: Any) -> None:
        """An object on whose state no result depends."""
        self.same(value)

    def generator(self, value: Any) -> None:
        """A generator of random numbers."""
        self.mute(value)

    def hidden(self, value: Any, why: str) -> None:
        """What nobody can watch."""
        if self.scope.reads(self.at.name):
            self.unseen.append((self.at, value, why))
        self.same(value)

    def referred(self, reference: weakref.ref[Any]) -> None:
        """A weak reference, whose object follows."""

    def context(self, variable: ContextVar[Any]) -> None:
        """A context variable, whose value follows."""

    def read_function(self, function: types.FunctionType) -> None:
        """A function that is opened."""

    def read_variables(self, space: Space, names: Iterable[str]) -> None:
        """Global variables that follow."""

    def environment(self, names: Iterable[str]) -> None:
        """Variables of the environment, and the number of threads."""
        for name in names:
            self.child(name, surrounding(name), 0)
