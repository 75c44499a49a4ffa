"""Fingerprints: two of the same scope are equal if nothing that a graph depends on has changed.

Numbers and texts count by value; tensors by identity and metadata; weights by their metadata and by which
modules share them, since they are looked up at every call; modules, functions and classes by identity;
containers and objects by what is in them.

Another walk would find the same if everything that a walk has read is still in its place, and no tensor has
another dtype, device or shape. Comparing identities tells that in a fraction of a walk's time.
"""

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attngraph.capture.state import kinds as K
from attngraph.capture.state.scope import BUILT_IN, EVERYTHING, TENSORS, Scope, Space, surrounding
from attngraph.capture.state.walk import Walk
from attngraph.ir import budgets

_COMPARED_EXACTLY = frozenset({int, str, bytes, type(None), torch.dtype, torch.device})


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


class Taken(tuple[Any, ...]):
    """A fingerprint, whose hash is computed once."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def fingerprint(
    targets: Iterable[Any], scope: Scope = EVERYTHING, weights: Mapping[int, int] = MappingProxyType({})
) -> Taken:
    """The state of the targets (modules, functions, values) and of all that the scope's code reads.
    `weights`: during a trace, from the identity of each weight to that of the one that it stands for."""
    found = Fingerprint(scope, weights)
    found.everything(targets)
    return Taken(found.found)


class Fingerprint(Walk):
    """The walk that takes a fingerprint: `found`."""

    def __init__(self, scope: Scope = EVERYTHING, weights: Mapping[int, int] = MappingProxyType({})) -> None:
        super().__init__(scope)
        self.weights = weights
        self.found: list[Any] = []

    def child(self, step: str, value: Any, depth: int) -> None:
        self.found.append(step)
        self.visit(value, depth)

    def function(self, function: types.FunctionType, depth: int) -> None:
        self.found.append(Same(function.__code__))
        super().function(function, depth)

    def plain(self, value: Any) -> None:
        self.found.append(value if type(value) in _COMPARED_EXACTLY else Exact(type(value), repr(value)))

    def tensor(self, value: Tensor) -> None:
        # A tensor that a graph takes as a constant lives as long as that, so its address is its own.
        identity = self.weights.get(id(value)) or getattr(value, "serial_number", id(value))
        self.found.append((identity, *self._about(value)))

    def weight(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            self.found.append((name, None))
            return
        # Weights may be replaced by similar ones; only which modules share a weight matters.
        order, lazy = self.seen.setdefault(id(tensor), len(self.seen)), is_lazy(tensor)
        about = (tensor.dtype, tensor.device) if lazy else self._about(tensor, name in module._buffers)
        self.found.append((name, order, lazy, *about))

    def _about(self, tensor: Tensor, wants: bool = True) -> tuple[Any, ...]:
        layout = (tensor.stride(), tensor.storage_offset()) if self.scope.layouts else ()
        return tensor.dtype, tensor.device, tuple(tensor.shape), wants and tensor.requires_grad, *layout

    def head(self, module: nn.Module) -> None:
        self.found += (id(module), module.training)

    def opened(self, value: Any) -> None:
        self.found.append(type(value))

    def same(self, value: Any) -> None:
        self.found.append(Same(value))

    def valued(self, value: Any) -> None:
        self.found.append((slice, repr(value)) if isinstance(value, slice) else (type(value), value))

    def buffer(self, value: Any) -> None:
        self.found += (Same(value), K.bytes_of(value))

    def length(self, value: Any, entries: int) -> None:
        self.found.append((type(value), entries))

    def members_of_set(self, value: Any) -> None:
        self.found.append(frozenset(exact(v) if isinstance(v, K.BY_VALUE) else Same(v) for v in value))

    def again(self, value: Any) -> None:
        self.found.append(self.seen[id(value)])


# --- whether another walk would find the same ---

_TABLES_OF = itemgetter(*K.NAMING, *K.HOOKS)
_ABOUT = attrgetter("__class__", "dtype", "device", "shape", "requires_grad")
_OWN = attrgetter("__dict__")
_OF_FUNCTIONS = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_ABOUT_FUNCTIONS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OF_PARTIALS = ("func", "args", "keywords")
Read = tuple[Iterable[Any], Any]
"""Objects that were found somewhere, and facts about them (numbers, names, dtypes)."""


class Reads:
    """What a walk has read: objects by identity, facts about them by value.

    It keeps nothing alive that can be referenced weakly. Once one of these is gone, its address may be
    another object's, so the record is stale.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Callable[[], Read], list[int], Any]] = []
        self._kept: dict[int, Callable[[], Any]] = {}
        self.is_stale = False

    def hold(self) -> bool:
        """Whether another walk would read the same."""
        if self.is_stale:
            return False
        try:
            for read, known, facts in self._known:
                found, now = read()
                if now != facts or [*map(id, found)] != known:
                    return False
        except (AttributeError, KeyError, RuntimeError):  # deleted meanwhile, or changed by another thread
            return False
        return True

    def add(self, read: Callable[[], Read], not_kept: Container[int] = ()) -> None:
        """Record what `read` gives. `not_kept` are objects by their identity that need not live on, as all
        that they hold is read as well."""
        found, facts = read()
        self.note(read, [*found], facts, not_kept)

    def note(
        self, read: Callable[[], Read], values: Sequence[Any], facts: Any, not_kept: Container[int] = ()
    ) -> None:
        """Record what `read` gave piece by piece."""
        for value in values:
            if id(value) not in not_kept:
                self.reference(value)
        self._known.append((read, [*map(id, values)], facts))

    def reference(self, value: Any) -> Callable[[], Any]:
        """Gives the value back while it lives."""
        if id(value) not in self._kept:
            try:
                self._kept[id(value)] = weakref.ref(value, self._gone)
            except TypeError:
                self._kept[id(value)] = lambda: value
        return self._kept[id(value)]

    def _gone(self, _: Any) -> None:
        self.is_stale = True


class RecordingWalk(Fingerprint):
    """A walk that records what it reads. Each place is recorded before it is read: if another thread changes
    it in between, the record is stale."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.reads = Reads()
        self._read: set[int] = set()
        """The modules that are recorded."""
        self._plain_functions: list[Callable[[], Any]] = []
        self._of_functions: list[Any] = []
        """Functions with nothing around them, and what was read of each when it was met."""

    def start(self, target: Any) -> None:
        if isinstance(target, nn.Module):
            skips = {number for number, _ in self.scope.left_out}
            modules = [m for m in target.modules() if id(m) not in skips]
            self._modules(modules)
        super().start(target)

    def _modules(self, modules: Sequence[nn.Module], skipped: frozenset[str] = frozenset()) -> None:
        """Record modules and their weights, all but the attributes of these names."""
        self._read.update(map(id, modules))
        own = {id(table) for m in modules for table in _TABLES_OF(vars(m))}
        parts = [_parts_of(tuple(vars(m)), skipped) for m in modules]
        referred = [*map(self.reads.reference, modules)]
        ordered = not K.ORDER.isdisjoint(self.scope.names)
        self.reads.add(partial(_of_modules, referred, parts, skipped, ordered), not_kept=own)
        tables = (table for m in modules for table in (m._parameters, m._buffers))
        held = (t for table in tables for name, t in table.items() if t is not None and name not in skipped)
        self._tensors([*held])

    def _tensors(self, tensors: Sequence[Tensor]) -> None:
        if any(map(is_lazy, tensors)):
            self.reads.is_stale = True  # their shapes cannot be read
        else:
            referred, layouts = [*map(self.reads.reference, tensors)], self.scope.layouts

            def read() -> Read:
                found = [reference() for reference in referred]
                facts: list[Any] = [*map(_ABOUT, found), *map(len, map(_OWN, found))]
                return (), facts + [(t.stride(), t.storage_offset()) for t in (found if layouts else ())]

            self.reads.add(read)

    def tensor(self, value: Tensor) -> None:
        self._tensors([value])
        super().tensor(value)

    def attributes_of_tensor(self, tensor: Tensor, depth: int) -> None:
        if K.own_attributes(tensor):
            self.reads.add(partial(_of_dict, vars(tensor)))
        super().attributes_of_tensor(tensor, depth)

    def referred(self, reference: weakref.ref[Any]) -> None:
        self.reads.add(lambda: ((reference(),), None))

    def module(self, module: nn.Module, depth: int) -> None:
        if id(module) not in self._read:
            self._modules([module], self._skipped(module))
        super().module(module, depth)

    def opened(self, value: Any) -> None:
        kind: Any = type(value)
        names = K.slots_of(kind) + (_OF_PARTIALS if isinstance(value, partial) else ())
        skipped = self._skipped(value) | K.set_on_entry(kind)
        reference = self.reads.reference(value)

        def read() -> Read:
            thing = reference()
            own = getattr(thing, "__dict__", None)
            held = {name: value for name, value in (own or {}).items() if name not in skipped}
            return [type(thing), *(getattr(thing, n, K.MISSING) for n in names), *held.values()], [*held]

        self.reads.add(read)
        super().opened(value)

    def buffer(self, value: Any) -> None:
        referred = self.reads.reference(value)
        self.reads.add(lambda: ((), K.bytes_of(referred())))
        super().buffer(value)

    def kind(self, kind: type, depth: int) -> None:
        for owner in kind.__mro__:
            counts = not K.is_known(K.module_of(owner)) or issubclass(owner, nn.Module)
            if owner not in self.kinds and counts:
                members = _taking([name for name, _ in self.members(owner)])
                self.reads.add(partial(_of_class, self.reads.reference(owner), members))
        super().kind(kind, depth)

    def length(self, value: Any, entries: int) -> None:
        if len(value) > budgets.STATE_ENTRIES and not self.scope.reads(self.at.name):
            self.reads.add(lambda: ((), len(value)))
        elif isinstance(value, (dict, types.MappingProxyType)):
            self.reads.add(partial(_of_dict, value))
        elif isinstance(value, (list, set, deque)):
            self.reads.add(lambda: (value, None))
        super().length(value, entries)

    def context(self, variable: ContextVar[Any]) -> None:
        self.reads.add(lambda: ((variable.get(None),), None))

    def read_function(self, function: types.FunctionType) -> None:
        reference = self.reads.reference(function)

        def read() -> Read:
            found = reference()
            cells = map(K.inside, found.__closure__ or ())
            return [*_OF_FUNCTIONS(found), *cells, *found.__dict__.values()], [*found.__dict__]

        if function.__dict__ or function.__closure__:
            self.reads.add(read)
        else:
            self._plain_functions.append(reference)
            self._of_functions += _ABOUT_FUNCTIONS(function)

    def everything(self, targets: Iterable[Any]) -> None:
        super().everything(targets)
        self.reads.note(partial(_of_functions, self._plain_functions), self._of_functions, 0)

    def read_variables(self, space: Space, names: Iterable[str]) -> None:
        present = _taking([name for name in names if name in space.held])
        others = [name for name in names if name not in space.held]
        built_in = [name for name in others if name in BUILT_IN]
        missing = [name for name in others if name not in BUILT_IN and space is not TENSORS]

        def read() -> Read:
            held = space.held
            return [*present(held), *map(BUILT_IN.get, built_in), *map(space.get, missing)], len(held)

        self.reads.add(read)

    def environment(self, names: Iterable[str]) -> None:
        if names:
            self.reads.add(lambda: ((), [*map(surrounding, names)]))
        super().environment(names)

    def _skipped(self, owner: Any) -> frozenset[str]:
        return frozenset(name for number, name in self.scope.left_out if number == id(owner))


@lru_cache(maxsize=4096)
def _parts_of(names: tuple[str, ...], skipped: frozenset[str]) -> Callable[[Any], Any]:
    """Takes what counts of the attributes of a module that has these: whether it trains, and what users set.
    (What is in its tables is looked at itself.)"""
    wanted = ("training", *K.set_by_user(names))
    return _taking([name for name in wanted if name in names and name not in skipped])


def _of_modules(
    references: Sequence[Callable[[], Any]], parts: Sequence[Callable[[Any], Any]], skipped: frozenset[str],
    ordered: bool,
) -> Read:  # fmt: skip
    """The attributes of modules that forwards read (`parts` takes them of each), the contents of the tables
    that PyTorch keeps in them, and how many attributes there are; their names, if code asks for all in
    order."""
    modules = [reference() for reference in references]
    own: list[Any] = [*map(vars, modules)]
    tables = [*chain.from_iterable(map(_TABLES_OF, own))]
    attributes = chain.from_iterable(part(one) for part, one in zip(parts, own, strict=True))
    if skipped:
        tables = [{name: value for name, value in one.items() if name not in skipped} for one in tables]
        own = [{name: value for name, value in one.items() if name not in skipped} for one in own]
    held = chain.from_iterable(map(dict.values, tables))
    names = [*map(len, own), *chain.from_iterable(tables), *map(len, tables)]
    if ordered:
        names += chain.from_iterable(own)
    return [*map(type, modules), *attributes, *held], names


def _of_class(reference: Callable[[], Any], members: Callable[[Any], Sequence[Any]]) -> Read:
    kind = reference()
    return [type(kind), *members(vars(kind))], len(vars(kind))


def _of_functions(references: Sequence[Callable[[], Any]]) -> Read:
    functions = [reference() for reference in references]
    attributes = sum(map(len, map(_OWN, functions)))
    return chain.from_iterable(map(_ABOUT_FUNCTIONS, functions)), attributes


def _taking(names: Sequence[str]) -> Callable[[Any], Sequence[Any]]:
    """Takes these of a dictionary, as a tuple."""
    if len(names) < 2:
        return lambda held: [held[name] for name in names]
    return itemgetter(*names)


def _of_dict(held: Mapping[Any, Any]) -> Read:
    return [*held, *held.values()], None
