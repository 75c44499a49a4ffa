"""Whether another walk through a model's state would find the same as one before.

It would if everything that the walk has read is still in its place, and no tensor has another dtype, device
or shape. Comparing identities tells that in a fraction of a walk's time.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence, Sized
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attngraph.capture.state.code import globals_in
from attngraph.capture.state.kinds import is_open, own_classes, set_on_entry, slots_of
from attngraph.capture.state.walk import BACKWARD_HOOKS, FORWARD_HOOKS, NAMING, LeftOut, Walk, bytes_of
from attngraph.ir import budgets

_TABLES_OF = itemgetter(*NAMING, *FORWARD_HOOKS, *BACKWARD_HOOKS)
_ABOUT = attrgetter("__class__", "dtype", "device", "shape", "requires_grad")
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_OF_PARTIALS = ("func", "args", "keywords")
_MISSING = object()


Read = tuple[Iterable[Any], Any]
"""Objects that were found somewhere, and facts about them (numbers, names, dtypes)."""


class Reads:
    """What a walk has read: objects by identity, facts about them by value.

    It keeps nothing alive that can be referenced weakly. Once one of these is gone, its address may be
    another object's, so the record is stale.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Callable[..., Read], tuple[Any, ...], list[int], Any]] = []
        self._kept: dict[int, Callable[[], Any]] = {}
        self.is_stale = False

    def hold(self) -> bool:
        """Whether another walk would read the same."""
        try:
            return not self.is_stale and all(self._same(*known) for known in self._known)
        except (AttributeError, KeyError, RuntimeError):  # deleted meanwhile, or changed by another thread
            return False

    @staticmethod
    def _same(read: Callable[..., Read], args: tuple[Any, ...], known: list[int], facts: Any) -> bool:
        found, now = read(*args)
        return now == facts and [*map(id, found)] == known

    def add(self, read: Callable[..., Read], *args: Any, not_kept: Container[int] = ()) -> None:
        """Record what `read(*args)` gives. `not_kept` are objects by their identity that need not live on, as
        all that they hold is read as well."""
        found, facts = read(*args)
        values = [*found]
        for value in values:
            if id(value) not in not_kept:
                self.reference(value)
        self._known.append((read, args, [*map(id, values)], facts))

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


class RecordingWalk(Walk):
    """A walk that records what it reads. Each place is recorded before it is read: if another thread changes
    it in between, the record is stale."""

    def __init__(self, left_out: LeftOut) -> None:
        super().__init__({}, left_out)
        self.reads = Reads()
        self._read: set[int] = set()
        """The modules that are recorded."""

    def start(self, target: Any) -> None:
        if isinstance(target, nn.Module):
            skips = {number for number, _ in self.left_out}
            modules = [m for m in target.modules() if id(m) not in skips]
            self._modules(modules)
        super().start(target)

    def _modules(self, modules: Sequence[nn.Module], skipped: frozenset[str] = frozenset()) -> None:
        """Record modules and their weights, all but the attributes of these names."""
        self._read.update(map(id, modules))
        own = {id(table) for m in modules for table in _TABLES_OF(vars(m))}
        self.reads.add(_of_modules, [*map(self.reads.reference, modules)], skipped, not_kept=own)
        tables = (table for m in modules for table in (m._parameters, m._buffers))
        held = (t for table in tables for name, t in table.items() if t is not None and name not in skipped)
        self._tensors([*held])

    def _tensors(self, tensors: Sequence[Tensor]) -> None:
        if any(map(is_lazy, tensors)):
            self.reads.is_stale = True  # their shapes cannot be read
        else:
            self.reads.add(_metadata, [*map(self.reads.reference, tensors)])

    def visit(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._tensors([value])
        elif isinstance(value, weakref.ref):
            self.reads.add(_target, value)
        super().visit(value, depth)

    def module(self, module: nn.Module, depth: int) -> None:
        if id(module) not in self._read:
            self._modules([module], self._skipped(module))
        super().module(module, depth)

    def thing(self, value: Any, depth: int) -> None:
        kind: Any = type(value)
        if is_open(kind):
            names = slots_of(kind) + (_OF_PARTIALS if isinstance(value, partial) else ())
            skipped = self._skipped(value) | set_on_entry(kind)
            self.reads.add(_of_thing, self.reads.reference(value), names, skipped)
        super().thing(value, depth)

    def closed(self, value: Any) -> None:
        self.reads.add(_bytes, self.reads.reference(value))
        super().closed(value)

    def kind(self, kind: type) -> None:
        for owner in own_classes(kind):
            if owner not in self.kinds:
                self.reads.add(_of_class, self.reads.reference(owner))
        super().kind(kind)

    def plain(self, owner: Any, names: Iterable[str], space: Any) -> None:
        if isinstance(owner, types.ModuleType):
            self.reads.add(_of_names, space, tuple(names))
        super().plain(owner, names, space)

    def container(self, value: Any, depth: int) -> None:
        if len(value) > budgets.STATE_ENTRIES:
            self.reads.add(_length, value)
        elif isinstance(value, dict):
            self.reads.add(_of_dict, value)
        elif isinstance(value, (list, set, deque)):
            self.reads.add(_of_list, value)
        super().container(value, depth)

    def function(self, function: types.FunctionType, depth: int) -> None:
        self.reads.add(_of_function, self.reads.reference(function))
        self.reads.add(_of_names, function.__globals__, globals_in(function.__code__))
        super().function(function, depth)

    def _skipped(self, owner: Any) -> frozenset[str]:
        return frozenset(name for number, name in self.left_out if number == id(owner))


def _of_modules(references: Sequence[Callable[[], Any]], skipped: frozenset[str]) -> Read:
    """The attributes of modules, and the contents of the tables that PyTorch keeps in them."""
    modules = [reference() for reference in references]
    own = [*map(vars, modules)]
    held = [*own, *chain.from_iterable(map(_TABLES_OF, own))]
    if skipped:
        held = [{name: value for name, value in one.items() if name not in skipped} for one in held]
    values = chain.from_iterable(map(dict.values, held))
    return [*map(type, modules), *values], [*map(len, held), *chain.from_iterable(held)]


def _of_thing(reference: Callable[[], Any], names: Sequence[str], skipped: frozenset[str]) -> Read:
    thing = reference()
    own = getattr(thing, "__dict__", None)
    held = {name: value for name, value in (own or {}).items() if name not in skipped}
    slots = (getattr(thing, name, _MISSING) for name in names)
    return [type(thing), *slots, *held.values()], [*held]


def _of_class(reference: Callable[[], Any]) -> Read:
    space = vars(reference())
    return space.values(), [*space]


def _of_function(reference: Callable[[], Any]) -> Read:
    function = reference()
    found = [getattr(function, name) for name in _OF_FUNCTIONS]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(_MISSING)
    return [*found, *function.__dict__.values()], [*function.__dict__]


def _of_names(space: dict[str, Any], names: Iterable[str]) -> Read:
    return [space.get(name, _MISSING) for name in names], None


def _of_dict(held: dict[Any, Any]) -> Read:
    return [*held, *held.values()], None


def _of_list(held: Iterable[Any]) -> Read:
    return held, None


def _length(held: Sized) -> Read:
    return (), len(held)


def _target(reference: weakref.ref[Any]) -> Read:
    return (reference(),), None


def _metadata(references: Sequence[Callable[[], Any]]) -> Read:
    return (), [*map(_ABOUT, (reference() for reference in references))]


def _bytes(reference: Callable[[], Any]) -> Read:
    return (), bytes_of(reference())
