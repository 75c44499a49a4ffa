"""Fingerprints of the state, besides its arguments, that a forward may depend on.

That is the state of the model and of what it references: closures, globals, classes.
Two fingerprints are equal if nothing that a trace can depend on has changed. One is taken at every call (a
change requires another graph) and before and after a trace (a change is a side effect, which a graph would
lose).
"""

from __future__ import annotations

import builtins
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import _AttrProxy
from torch.nn.parameter import is_lazy

from attngraph.capture.state.code import globals_in
from attngraph.capture.state.kinds import has_value, is_foreign, is_open, own_classes, set_on_entry, slots_of
from attngraph.ir import budgets

PLAIN = (int, bool, str, bytes, type(None), torch.dtype, torch.device)
_BY_VALUE = (*PLAIN, float)
_COMPARED_EXACTLY = frozenset({int, str, bytes, type(None), torch.dtype, torch.device})
_MARKS = {"_is_torch_compile", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
"""Attributes by which PyTorch's own tools mark modules: no forward reads them."""
MODULES_OWN = frozenset(vars(nn.Module())) | _MARKS
MODULES_TABLES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, (dict, set)))
NAMING = ("_parameters", "_buffers", "_modules")
"""Of a module's tables those whose entries are read as attributes of it."""
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
_RESTORED = (list, dict, set, OrderedDict, defaultdict, Counter, deque)


LeftOut = frozenset[tuple[int, str]]
"""Attributes that a fingerprint skips: the identity of each owner, and the name."""


class Same:
    """Compares an object by identity. It keeps the object alive, so that its address is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Exact(NamedTuple):
    """A value that equals only one of its type and text: `True` is not 1, -0.0 is not 0.0, NaN is NaN."""

    type: type
    text: str

    def __repr__(self) -> str:
        return self.text


def exact(value: Any) -> Any:
    return value if type(value) in _COMPARED_EXACTLY else Exact(type(value), repr(value))


def fingerprint(
    targets: Iterable[Any], weights: Mapping[int, int] | None = None, left_out: LeftOut = frozenset()
) -> tuple[Any, ...]:
    """The state of everything reachable from the targets (modules, functions, values): numbers and strings by
    value; tensors by identity and metadata; modules by identity, training flag, weights' metadata, hooks and
    attributes; containers and plain objects by their contents, and by the plain attributes of their class.

    Args:
        weights: during a trace, whose parameters and buffers are stand-ins: from the identity of each to
            that of the tensor that it stands for.
        left_out: attributes that are skipped.
    """
    return tuple(walk(targets, weights, left_out).found)


def _is_of_stand_ins(key: Any) -> bool:
    """Whether a key is a class of tensors that exist in a trace alone, or holds one. What a library notes
    under it (einx does, under the types of its operands) is no state of the model."""
    if isinstance(key, tuple):
        return any(map(_is_of_stand_ins, key))
    return isinstance(key, type) and issubclass(key, (FakeTensor, FunctionalTensor))


def hooks_not_traced(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The hooks that a call runs, or its backward pass if gradients are recorded, and a trace does not: the
    path of each one's module, its kind, and itself. Other forward hooks are code of the forward. Those of
    torch.distributed move weights between devices."""
    for path, module in model.named_modules():
        for name in FORWARD_HOOKS:
            for hook in getattr(module, name).values():
                if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
                    yield path, "hook", hook
        for name in BACKWARD_HOOKS if torch.is_grad_enabled() else ():
            for hook in getattr(module, name).values():
                yield path, "backward hook", hook


class Place(NamedTuple):
    """An attribute or a global variable: the module, object, class or function that it belongs to, and its
    name. Without a name, all of the owner's."""

    owner: Any
    name: str


def walk(
    targets: Iterable[Any], weights: Mapping[int, int] | None = None, left_out: LeftOut = frozenset()
) -> Walk:
    """What is reachable from the targets, and all that `fingerprint` says of it."""
    found = Walk(weights or {}, left_out)
    for target in targets:
        found.start(target)
    return found


class Walk:
    """Visits values and what they reference.

    Attributes:
        found: the fingerprint.
        containers: each with where it belongs; the dictionaries of attributes as well.
        variables: numbers and strings of classes and files, and attributes in slots.
        buffers: objects that may have bytes, such as numpy arrays, each with where it belongs.
    """

    def __init__(self, weights: Mapping[int, int], left_out: LeftOut) -> None:
        self.weights, self.left_out = weights, left_out
        self.found: list[Any] = []
        self.at = Place(None, "")
        self.containers: list[tuple[Place, Any]] = []
        self.variables: list[tuple[Place, Any]] = []
        self.buffers: list[tuple[Place, Any]] = []
        self.seen: dict[int, int] = {}
        self.kinds: set[type] = set()

    def start(self, target: Any) -> None:
        self.at = Place(target, "")
        with torch._C.DisableTorchFunction():  # a trace would look at each attribute of a tensor that is read
            self.visit(target, 0)

    def visit(self, value: Any, depth: int) -> None:
        found = self.found
        if type(value) in _COMPARED_EXACTLY:
            found.append(value)
        elif isinstance(value, _BY_VALUE):
            found.append(exact(value))
        elif isinstance(value, Tensor):
            # A tensor that a graph takes as a constant lives as long as that, so its address is its own.
            identity = self.weights.get(id(value)) or getattr(value, "serial_number", id(value))
            found.append((identity, value.dtype, value.device, tuple(value.shape), value.requires_grad))
        elif isinstance(value, weakref.ref):
            self.visit(value(), depth)
        elif isinstance(value, _AttrProxy):
            self.visit(value.get_base(), depth)  # type: ignore[attr-defined]
        elif id(value) in self.seen:
            found.append(self.seen[id(value)])
        elif depth > budgets.STATE_DEPTH:
            found.append(Same(value))
        else:
            self.seen[id(value)] = len(self.seen)
            self.open(value, depth + 1)

    def open(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self.module(value, depth)
        elif isinstance(value, type):
            self.kind(value)
        elif isinstance(value, types.ModuleType) or value is vars(builtins):
            self.found.append(Same(value))
        elif isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            self.container(value, depth)
        elif isinstance(value, types.FunctionType):
            self.found.append(Same(value))
            if depth <= 2:
                self.function(value, depth)
        elif isinstance(value, types.MethodType):
            self.found.append(Same(value.__func__))
            self.visit(value.__self__, depth)
        else:
            self.thing(value, depth)

    def thing(self, value: Any, depth: int) -> None:
        """An object: by its attributes if they are its whole state, else as `closed` says."""
        kind: Any = type(value)
        names = slots_of(kind)
        held = getattr(value, "__dict__", None)
        if not is_open(kind) or (held is None and not names):
            self.closed(value)
            return
        self.kind(kind)
        if isinstance(held, dict):
            self.containers.append((Place(value, ""), held))
        if isinstance(value, partial):
            for inner in (value.func, value.args, value.keywords):
                self.visit(inner, depth)
        for name in names:
            self.found.append(name)
            if hasattr(value, name):
                self.variables.append((Place(value, name), getattr(value, name)))
            self.visit(getattr(value, name, None), depth)
        passing = set_on_entry(kind)
        around = self.at
        for name, inner in tuple((held or {}).items()):
            if name not in passing and (id(value), name) not in self.left_out:
                self.found.append(name)
                self.at = Place(value, name)
                self.visit(inner, depth)
        self.at = around

    def closed(self, value: Any) -> None:
        """An object that cannot be inspected: by value if it is hashable by value, else by identity."""
        if isinstance(value, slice):
            self.found.append((slice, repr(value)))
        elif has_value(value):
            self.found.append((type(value), value))
        else:
            self.found += (Same(value), bytes_of(value))
            self.buffers.append((self.at, value))

    def kind(self, kind: type) -> None:
        """A class, with the plain attributes that its objects read."""
        self.found.append(kind)
        for owner in own_classes(kind):
            if owner not in self.kinds:
                self.kinds.add(owner)
                self.plain(owner, vars(owner), vars(owner))
                self.tables(owner)
                if issubclass(owner, nn.Module):
                    forward = vars(owner).get("forward")
                    self.visit(forward, 0)

    def plain(self, owner: Any, names: Iterable[str], space: Mapping[str, Any]) -> None:
        """The numbers and strings of these names in the namespace of a class or a file."""
        for name in names:
            value = space.get(name)
            if isinstance(value, (int, float, str)) and not name.startswith("__"):
                self.found += (name, exact(value))
                self.variables.append((Place(owner, name), value))

    def tables(self, owner: type) -> None:
        """The containers among the attributes of a class."""
        around = self.at
        for name, value in tuple(vars(owner).items()):
            if isinstance(value, (list, tuple, set, frozenset, dict, deque)) and not name.startswith("__"):
                self.at = Place(owner, name)
                self.visit(value, 0)
        self.at = around

    def container(self, value: Any, depth: int) -> None:
        entries = value
        if isinstance(value, dict):
            entries = [(name, inner) for name, inner in value.items() if not _is_of_stand_ins(name)]
        self.found.append((type(value), len(entries)))
        if type(value) in _RESTORED:
            self.containers.append((self.at, value))
        if len(value) > budgets.STATE_ENTRIES:
            self.found.append(Same(value))
        elif isinstance(value, dict):
            for key, inner in entries:
                self.visit(key, depth)
                self.visit(inner, depth)
        elif isinstance(value, (set, frozenset)):
            self.found.append(frozenset(exact(v) if isinstance(v, _BY_VALUE) else Same(v) for v in value))
        else:
            for inner in value:
                self.visit(inner, depth)

    def identity(self, module: nn.Module) -> Any:
        """What tells this module from others."""
        return id(module)

    def module(self, module: nn.Module, depth: int) -> None:
        found, own = self.found, vars(module)
        found += (self.identity(module), module.training)
        self.kind(type(module))
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if (id(module), name) in self.left_out:
                    continue
                if tensor is None:
                    found.append((name, None))
                    continue
                # Weights may be replaced by similar ones; only which modules share a weight matters.
                order, lazy = self.seen.setdefault(id(tensor), len(self.seen)), is_lazy(tensor)
                shape = () if lazy else tuple(tensor.shape)
                wants = store is module._buffers and tensor.requires_grad
                found.append((name, order, tensor.dtype, tensor.device, shape, lazy, wants))
        for name in BACKWARD_HOOKS:
            found += map(Same, own[name].values())
        self.containers.append((Place(module, ""), own))
        around = self.at
        for name in FORWARD_HOOKS:
            for hook in tuple(own[name].values()):
                found.append(name)
                self.at = Place(module, name)
                self.visit(hook, 0)
        for name in _set_by_user(tuple(own)):
            if (id(module), name) not in self.left_out:
                found.append(name)
                self.at = Place(module, name)
                self.visit(own.get(name), depth)  # another thread's call may have removed it
        self.at = around
        for name, child in module._modules.items():
            found.append(name)
            self.visit(child, 0)

    def function(self, function: types.FunctionType, depth: int) -> None:
        """What a function can read besides its arguments: its closure, its defaults, the globals it names,
        and its own attributes."""
        if function.__dict__:
            self.visit(function.__dict__, depth)
        self.visit(function.__defaults__, depth)
        self.visit(function.__kwdefaults__, depth)
        around = self.at
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.at = Place(function, name)
            try:
                self.visit(cell.cell_contents, depth)
            except ValueError:
                self.found.append("empty")
        self.at = around
        names = function.__code__.co_names
        for name in globals_in(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                around, self.at = self.at, Place(function, name)
                self.variables.append((self.at, value))
                self.visit(value, depth)
                self.at = around
                if isinstance(value, types.ModuleType) and not is_foreign(value.__name__):
                    self.plain(value, names, vars(value))
                    self.held_by(value, names, depth)

    def held_by(self, module: types.ModuleType, names: Iterable[str], depth: int) -> None:
        """What a file has under these names besides numbers and strings."""
        for name in names:
            value = vars(module).get(name)
            foreign = isinstance(value, type) and is_foreign(value.__module__)
            if not foreign and not isinstance(value, (int, float, str, types.ModuleType, types.NoneType)):
                around, self.at = self.at, Place(module, name)
                self.visit(value, depth)
                self.at = around


@lru_cache(maxsize=4096)
def _set_by_user(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the names of a module's attributes those that not every module has."""
    return tuple(name for name in names if name not in MODULES_OWN)


def bytes_of(value: Any) -> bytes:
    """The contents of a small buffer, such as a numpy array; empty for other objects."""
    try:
        view = memoryview(value)
    except TypeError:
        return b""
    return view.tobytes() if view.nbytes <= budgets.STATE_BYTES else b""
