"""A copy of the state that a trace may change, to find what it changed and to put everything back.

A trace runs the model's Python code, some of it several times. What that does to attributes, containers,
iterators, numpy arrays and small tensors must not be seen by the call that is computed afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.state.code import nested
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.state.kinds import is_known, slots_of, state_of_generator
from attngraph.capture.state.parts import BY_VALUE, MODULES_TABLES, NAMING, Place, bytes_of, is_of_stand_ins
from attngraph.capture.state.scope import MISSING, Space, read_by
from attngraph.capture.state.walk import Walk
from attngraph.ir import budgets

_NO_NAMES: dict[Any, Any] = {}
_NO_VALUES: frozenset[Any] = frozenset()


_RESTORED = (list, dict, set, OrderedDict, defaultdict, Counter, deque)


class _Found(Walk):
    """The walk that finds what can be put back: containers, each with where it belongs, the dictionaries of
    attributes as well; variables of classes and attributes in slots; objects with bytes, such as arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.containers: list[tuple[Place, Any]] = []
        self.first: dict[tuple[int, str], tuple[Place, Any]] = {}
        """Variables with the values that were found first."""
        self.generators: list[tuple[Place, Any, Any, Callable[[Any], None]]] = []
        """Generators of random numbers, with their states and what sets them."""
        self._nested: set[int] = set()
        self.buffers: list[tuple[Place, Any]] = []

    def head(self, module: nn.Module) -> None:
        self.containers.append((Place(module, ""), vars(module)))

    def opened(self, value: Any) -> None:
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self.containers.append((Place(value, ""), held))
        slots = ((name, getattr(value, name, MISSING)) for name in slots_of(type(value)))  # type: ignore[arg-type]
        for name, inner in slots:
            if inner is not MISSING:
                self.note(Place(value, name), inner)

    def members(self, owner: type) -> Iterator[tuple[str, Any]]:
        for name, value in super().members(owner):
            if isinstance(value, (int, float, str)):
                self.note(Place(owner, name), value)
            yield name, value

    def begins(self, frame: types.FrameType) -> None:
        """Find what code can read that is about to run: variables by the names in it, also those of files,
        and what its functions close over."""
        code = frame.f_code
        self.codes.add(id(code))
        self.at = Place(None, "")
        functions = self.closed.pop(id(code), ())
        for function in functions:
            self.inside_of(function, 1)
        if not functions and id(code) not in self._nested:
            for name in code.co_freevars:
                self.child(name, frame.f_locals.get(name), 1)
        self._nested.update(id(part) for part in nested(code))
        for space, names in read_by(code, frame.f_globals):
            if not is_known(space.name):
                self.variables(space, list(names))

    def container(self, value: Any, depth: int) -> None:
        if len(value) > budgets.STATE_ENTRIES:
            self.length(value, len(value))
        else:
            super().container(value, depth)

    def length(self, value: Any, entries: int) -> None:
        if type(value) in _RESTORED:
            self.containers.append((self.at, value))

    def buffer(self, value: Any) -> None:
        self.buffers.append((self.at, value))

    def generator(self, value: Any) -> None:
        found = state_of_generator(value)
        assert found is not None
        self.generators.append((self.at, value, *found))

    def read_variables(self, space: Space, names: Iterable[str]) -> None:
        for name in names:
            self.note(Place(space, name), space.get(name))

    def note(self, place: Place, value: Any) -> None:
        """Note a variable; what code changed meanwhile is known already."""
        owner = place.owner.held if isinstance(place.owner, Space) else place.owner
        self.first.setdefault((id(owner), place.name), (place, value))


class Snapshot:
    """The containers, attributes and variables reachable from the targets, and the hooks of modules, so that
    they can be restored."""

    def __init__(self, targets: Iterable[Any]) -> None:
        self._found = _Found()
        self._containers: list[tuple[Place, Any, Any]] = []
        self._buffers: list[tuple[Place, Any, bytes]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self.swapped = False
        """Whether a change puts an object in the place of another that was there before as well."""
        self._replacement: Callable[[Tensor], Tensor] | None = None
        for target in targets:
            self._found.start(target)
        self._copy()

    def add(self, frame: types.FrameType) -> None:
        """Add what code can read that is about to run."""
        with torch._C.DisableTorchFunction():
            self._found.begins(frame)
        before = len(self._containers)
        self._copy()
        self._replace(self._containers[before:])

    def _copy(self) -> None:
        """Copy what was found since."""
        found = self._found
        all_found = [
            each for place, c in found.containers for each in ((place, c), *_tables_of(place.owner, c))
        ]
        self._containers += ((place, c, c.copy() if c else _empty(c)) for place, c in all_found)
        self._buffers += ((place, value, bytes_of(value)) for place, value in found.buffers)
        is_traced = torch._C._len_torch_dispatch_stack() > 0  # nothing can be copied or written there
        small = (t for _, c in all_found if not is_traced for _, t in _entries(c) if _is_small(t))
        self._tensors += ((t, t._version, t.detach().clone()) for t in small)
        found.containers, found.buffers = [], []

    @property
    def _variables(self) -> Iterable[tuple[Place, Any]]:
        return self._found.first.values()

    def restore(self) -> None:
        for _, container, copy in self._containers:
            if _is_untouched(container, copy):
                continue  # other threads may read it
            if isinstance(container, list):
                container[:] = copy
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(copy)
        for place, value in self._variables:
            if _variable(place) is not value:
                _assign(place, value)
        for _, value, content in self._buffers:
            if isinstance(value, bytearray):
                value[:] = content
            elif content and bytes_of(value) != content and memoryview(value).c_contiguous:
                memoryview(value).cast("B")[:] = content
        for _, value, state, put_back in self._found.generators:
            if _drawn_from(value, state):
                put_back(state)
        for tensor, version, copy in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(copy)

    @contextlib.contextmanager
    def iterators_refused(self, refuse: Callable[[Place], None]) -> Iterator[None]:
        """Where the body would advance an iterator among the attributes, which nobody could take back, call
        `refuse` with its place and raise an error."""
        replaced = []
        for place, container, _ in self._containers:
            for name, value in _entries(container):
                if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
                    container[name] = _Refused(refuse, place if place.name else Place(place.owner, str(name)))
                    replaced.append((container, name, value))
        try:
            yield
        finally:
            for container, name, value in replaced:
                if any(n == name and isinstance(held, _Refused) for n, held in _entries(container)):
                    container[name] = value

    def replace_tensors(self, replacement: Callable[[Tensor], Tensor]) -> None:
        """Put replacements of tensors into attributes, lists and dictionaries, until they are restored; also
        into those that are added."""
        self._replacement = replacement
        self._replace(self._containers)

    def _replace(self, containers: Iterable[tuple[Place, Any, Any]]) -> None:
        for _, container, copy in containers:
            for name, value in _entries(copy):
                if isinstance(value, Tensor) and self._replacement is not None:
                    container[name] = self._replacement(value)

    def is_generator(self, place: Place) -> bool:
        """Whether a generator of random numbers is there."""
        return any(each is place for each, *_ in self._found.generators)

    def changed_attributes(self) -> list[Place]:
        """All attributes that are other objects now, and buffers that were there before."""
        found: list[Place] = []
        for (owner, whole), now, before in self._containers:
            held: Any = getattr(owner, "__dict__", None)
            is_buffers = isinstance(owner, nn.Module) and now is owner._buffers
            if not whole and (now is held or is_buffers):
                names = dict.fromkeys(before if is_buffers else (*before, *now))
                found += (Place(owner, n) for n in names if _is_another(now.get(n, now), before.get(n, now)))
        return found

    def containers(self) -> set[int]:
        """The identities of the containers."""
        return {id(container) for _, container, _ in self._containers}

    def first_change(self, weights: Mapping[int, int] | None = None) -> Place | None:
        """The first attribute or variable whose value is another one now, or whose container has changed.

        Args:
            weights: from the identity of each weight to that of the one that it stands for, during a trace.
        """

        def is_another(now: Any, before: Any) -> bool:
            """Another one that was there before is another one even if it has the same contents."""
            swapped = now is not before and id(now) in self._found.seen and not isinstance(now, BY_VALUE)
            self.swapped |= swapped
            return swapped or _is_another(now, before, weights or {})

        for place, container, copy in self._containers:
            if not place.name and isinstance(container, dict):
                for name in (*copy, *(n for n in container if n not in copy)):
                    if not is_of_stand_ins(name) and is_another(
                        container.get(name, container), copy.get(name, container)
                    ):
                        return Place(place.owner, str(name))
            elif not _is_untouched(container, copy) and _is_another(container, copy, weights or {}):
                return place
        variables = (place for place, value in self._variables if is_another(_variable(place), value))
        buffers = (place for place, value, content in self._buffers if bytes_of(value) != content)
        drawn = (place for place, value, state, _ in self._found.generators if _drawn_from(value, state))
        return next(itertools.chain(variables, buffers, drawn), None)


class _Refused:
    """Stands for an iterator, and refuses to be advanced."""

    def __init__(self, refuse: Callable[[Place], None], place: Place) -> None:
        self._refuse, self._place = refuse, place

    def __iter__(self) -> _Refused:
        return self

    def __next__(self) -> Any:
        self._refuse(self._place)
        raise ValueError("a trace cannot advance an iterator")


def _drawn_from(generator: Any, state: Any) -> bool:
    now = state_of_generator(generator)
    return now is not None and now[0] != state


def _empty(container: Any) -> Any:
    """What an empty container is compared with. (Most tables of most modules are empty.)"""
    return _NO_NAMES if isinstance(container, dict) else _NO_VALUES if isinstance(container, set) else ()


def _entries(container: Any) -> list[tuple[Any, Any]]:
    """The entries that can be set, with their keys."""
    if isinstance(container, dict):
        return list(container.items())
    return list(enumerate(container)) if isinstance(container, (list, deque)) else []


def _is_small(value: Any) -> bool:
    """Whether this is a tensor of few elements: a trace computes with those, and writes to them."""
    return (
        type(value) is Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and value.nbytes <= budgets.STATE_BYTES
    )


def _tables_of(owner: Any, held: Any) -> Iterator[tuple[Place, Any]]:
    """If these are the attributes of a module: its tables of weights, of submodules and of hooks."""
    if isinstance(owner, nn.Module) and held is vars(owner):
        for name in MODULES_TABLES:
            table = held.get(name)
            if isinstance(table, (dict, set)):
                yield Place(owner, "" if name in NAMING else name), table


def _is_another(now: Any, before: Any, weights: Mapping[int, int] = MappingProxyType({})) -> bool:
    """Whether a value is another one, and not a copy with the same contents."""
    return now is not before and fingerprint([now], weights=weights) != fingerprint([before], weights=weights)


def _same(container: Any, copy: Any) -> bool:
    """Whether two containers of equal length hold the same objects."""
    if isinstance(container, dict):
        return all(k in copy and copy[k] is v for k, v in container.items())
    if isinstance(container, set):
        return {id(v) for v in container} == {id(v) for v in copy}
    return all(map(operator.is_, container, copy))


def _is_untouched(container: Any, copy: Any) -> bool:
    """Whether a container holds the same objects as its copy, in the same order."""
    if len(container) != len(copy) or not _same(container, copy):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container, copy))


def _variable(place: Place) -> Any:
    owner = place.owner
    if isinstance(owner, Space):
        return owner.get(place.name)
    held = getattr(owner, "__dict__", {})
    return held[place.name] if place.name in held else getattr(owner, place.name, None)  # a slot


def _assign(place: Place, value: Any) -> None:
    if isinstance(place.owner, Space):
        if value is MISSING:
            place.owner.held.pop(place.name, None)
        elif place.name in place.owner.held or not isinstance(value, types.ModuleType):
            place.owner.held[place.name] = value
    elif value is MISSING:
        delattr(place.owner, place.name)
    else:
        setattr(place.owner, place.name, value)
