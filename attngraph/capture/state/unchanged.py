"""Whether another walk through a model's state would find the same as one before.

It would if everything that the walk has read is still in its place, and no tensor has another dtype, device
or shape. Comparing identities tells that in a fraction of a walk's time.
"""

import os
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attngraph.capture.state import kinds as K
from attngraph.capture.state.fingerprint import Fingerprint
from attngraph.capture.state.scope import BUILT_IN, TENSORS, Scope, Space
from attngraph.ir import budgets

_TABLES_OF = itemgetter(*K.NAMING, *K.HOOKS)
_ABOUT = attrgetter("__class__", "dtype", "device", "shape", "requires_grad")
_OWN = attrgetter("__dict__")
_LAYOUT = methodcaller("stride"), methodcaller("storage_offset")
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
        try:
            return not self.is_stale and all(self._same(*known) for known in self._known)
        except (AttributeError, KeyError, RuntimeError):  # deleted meanwhile, or changed by another thread
            return False

    @staticmethod
    def _same(read: Callable[[], Read], known: list[int], facts: Any) -> bool:
        found, now = read()
        return now == facts and [*map(id, found)] == known

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
            referred = [*map(self.reads.reference, tensors)]
            self.reads.add(partial(_metadata, referred, self.scope.layouts))

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
        self.reads.add(partial(_of_thing, self.reads.reference(value), names, skipped))
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
        if not function.__dict__ and not function.__closure__:
            self._plain_functions.append(self.reads.reference(function))
            self._of_functions += _ABOUT_FUNCTIONS(function)
        else:
            self.reads.add(partial(_of_function, self.reads.reference(function)))

    def everything(self, targets: Iterable[Any]) -> None:
        super().everything(targets)
        self.reads.note(partial(_of_functions, self._plain_functions), self._of_functions, 0)

    def read_variables(self, space: Space, names: Iterable[str]) -> None:
        present = [name for name in names if name in space.held]
        others = [name for name in names if name not in space.held]
        built_in = tuple(name for name in others if name in BUILT_IN)
        missing = tuple(name for name in others if name not in BUILT_IN and space is not TENSORS)
        self.reads.add(partial(_of_variables, space, _taking(present), built_in, missing))

    def environment(self, names: Iterable[str]) -> None:
        if names:
            self.reads.add(lambda: ((), [*map(os.environ.get, names)]))
        super().environment(names)

    def _skipped(self, owner: Any) -> frozenset[str]:
        return frozenset(name for number, name in self.scope.left_out if number == id(owner))


@lru_cache(maxsize=4096)
def _parts_of(names: tuple[str, ...], skipped: frozenset[str]) -> Callable[[Any], Any]:
    """Takes what counts of the attributes of a module that has these: whether it trains, and what users set.
    (What is in its tables is looked at itself.)"""
    wanted = ("training", *(name for name in names if name not in K.MODULES_OWN))
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


def _of_thing(reference: Callable[[], Any], names: Sequence[str], skipped: frozenset[str]) -> Read:
    thing = reference()
    own = getattr(thing, "__dict__", None)
    held = {name: value for name, value in (own or {}).items() if name not in skipped}
    slots = (getattr(thing, name, K.MISSING) for name in names)
    return [type(thing), *slots, *held.values()], [*held]


def _of_class(reference: Callable[[], Any], members: Callable[[Any], Sequence[Any]]) -> Read:
    kind = reference()
    return [type(kind), *members(vars(kind))], len(vars(kind))


def _of_functions(references: Sequence[Callable[[], Any]]) -> Read:
    functions = [reference() for reference in references]
    attributes = sum(map(len, map(_OWN, functions)))
    return chain.from_iterable(map(_ABOUT_FUNCTIONS, functions)), attributes


def _of_function(reference: Callable[[], Any]) -> Read:
    function = reference()
    cells = map(K.inside, function.__closure__ or ())
    return [*_OF_FUNCTIONS(function), *cells, *function.__dict__.values()], [*function.__dict__]


def _of_variables(
    space: Space, present: Callable[[Any], Sequence[Any]], built_in: Sequence[str], missing: Sequence[str]
) -> Read:
    held = space.held
    others = (*map(BUILT_IN.get, built_in), *map(space.get, missing))
    return [*present(held), *others], len(held)


def _taking(names: Sequence[str]) -> Callable[[Any], Sequence[Any]]:
    """Takes these of a dictionary, as a tuple."""
    if len(names) < 2:
        return lambda held: [held[name] for name in names]
    return itemgetter(*names)


def _of_dict(held: Mapping[Any, Any]) -> Read:
    return [*held, *held.values()], None


def _metadata(references: Sequence[Callable[[], Any]], layouts: bool) -> Read:
    tensors = [reference() for reference in references]
    facts: list[Any] = [*map(_ABOUT, tensors), *map(len, map(_OWN, tensors))]
    if layouts:
        facts += [tuple(ask(t) for ask in _LAYOUT) for t in tensors]
    return (), facts
