"""A copy of the state that a trace may change, to find what it changed and to put everything back.

A trace runs the model's Python code, some of it several times. What that does to attributes, containers,
iterators, numpy arrays and small tensors must not be seen by the call that is computed afterwards.
"""

import contextlib
import itertools
import operator
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.capture.state import kinds as K
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.state.kinds import Place
from attngraph.capture.state.scope import BUILT_IN, Space, nested, read_by
from attngraph.capture.state.walk import Walk
from attngraph.ir import budgets

_NO_NAMES: dict[Any, Any] = {}
_NO_VALUES: frozenset[Any] = frozenset()
_RESTORED = (list, dict, set, OrderedDict, defaultdict, Counter, deque)


class _Kept(NamedTuple):
    """What is at a place, and what it was. Each kind says whether it is another now, and puts it back."""

    place: Place
    value: Any
    was: Any


class Container(_Kept):
    @staticmethod
    def of(place: Place, held: Any) -> "Container":
        """As it is now. (Most tables of most modules are empty, and compared with one that is.)"""
        empty = _NO_NAMES if isinstance(held, dict) else _NO_VALUES if isinstance(held, set) else ()
        return Container(place, held, held.copy() if held else empty)

    def is_another(self) -> bool:
        """Whether it does not hold the same objects, in the same order."""
        held, was = self.value, self.was
        if isinstance(held, set):
            return set(map(id, held)) != set(map(id, was))
        same = len(held) == len(was) and all(map(operator.is_, held, was))
        if isinstance(held, dict):
            same = same and all(map(operator.is_, held.values(), was.values()))
        return not same

    def put_back(self) -> None:
        if isinstance(self.value, list):
            self.value[:] = self.was
        else:
            self.value.clear()
            (self.value.extend if isinstance(self.value, deque) else self.value.update)(self.was)


class _Variable(_Kept):
    """An attribute of a class, one in a slot, or a variable. `value` is what it was."""

    def now(self) -> Any:
        owner, name = self.place
        if isinstance(owner, Space):
            return owner.get(name)
        held = getattr(owner, "__dict__", {})
        return held[name] if name in held else getattr(owner, name, None)  # a slot

    def is_another(self) -> bool:
        return self.now() is not self.value

    def put_back(self) -> None:
        owner, name = self.place
        if isinstance(owner, Space):
            if self.value is K.MISSING:
                owner.held.pop(name, None)
            elif name in owner.held or not isinstance(self.value, types.ModuleType):
                owner.held[name] = self.value
        elif self.value is K.MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, self.value)


class _Buffer(_Kept):
    """An object with bytes, such as a numpy array."""

    def is_another(self) -> bool:
        return bool(K.bytes_of(self.value) != self.was)

    def put_back(self) -> None:
        if isinstance(self.value, bytearray):
            self.value[:] = self.was
        elif self.was and memoryview(self.value).c_contiguous:
            memoryview(self.value).cast("B")[:] = self.was


class _Generator(_Kept):
    """A generator of random numbers, with its state and what sets it."""

    def is_another(self) -> bool:
        now = K.state_of_generator(self.value)
        return now is not None and now[0] != self.was[0]

    def put_back(self) -> None:
        self.was[1](self.was[0])


class _SmallTensor(_Kept):
    """A tensor of few elements, with its version and a copy: a trace computes with those, and writes to
    them."""

    def is_another(self) -> bool:
        return bool(self.value._version != self.was[0])

    def put_back(self) -> None:
        with torch.no_grad():
            self.value.copy_(self.was[1])


class Snapshot(Walk):
    """The containers, attributes and variables reachable from the targets, and the hooks of modules, so that
    they can be restored: containers, each with where it belongs, the dictionaries of attributes as well;
    variables of classes and attributes in slots; objects with bytes, such as arrays.

    Attributes:
        swapped: whether a change puts an object in the place of another that was there before as well.
    """

    def __init__(self, targets: Iterable[Any]) -> None:
        super().__init__()
        self.swapped = False
        self._found: list[tuple[Place, Any]] = []
        """Containers that are not copied yet."""
        self._containers: list[Container] = []
        self._variables: dict[tuple[int, str], _Variable] = {}
        """Variables with the values that were found first: what code changed meanwhile is known already."""
        self._others: list[_Buffer | _Generator] = []
        self._tensors: list[_SmallTensor] = []
        self._nested: set[int] = set()
        self._replacement: Callable[[Tensor], Tensor] | None = None
        self.everything(targets)
        self._copy()

    # --- what is found ---

    def head(self, module: nn.Module) -> None:
        self._found.append((Place(module, ""), vars(module)))

    def opened(self, value: Any) -> None:
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._found.append((Place(value, ""), held))
        for name in K.slots_of(type(value)):  # type: ignore[arg-type]
            if (inner := getattr(value, name, K.MISSING)) is not K.MISSING:
                self._note(Place(value, name), inner)

    def members(self, owner: type) -> Iterator[tuple[str, Any]]:
        for name, value in super().members(owner):
            if isinstance(value, (int, float, str)):
                self._note(Place(owner, name), value)
            yield name, value

    def container(self, value: Any, depth: int) -> None:
        if len(value) > budgets.STATE_ENTRIES and value is not BUILT_IN:
            self.length(value, len(value))
        else:
            super().container(value, depth)

    def length(self, value: Any, entries: int) -> None:
        if type(value) in _RESTORED:
            self._found.append((self.at, value))

    def buffer(self, value: Any) -> None:
        self._others.append(_Buffer(self.at, value, K.bytes_of(value)))

    def generator(self, value: Any) -> None:
        self._others.append(_Generator(self.at, value, K.state_of_generator(value)))

    def read_variables(self, space: Space, names: Iterable[str]) -> None:
        for name in names:
            self._note(Place(space, name), space.get(name))

    def _note(self, place: Place, value: Any) -> None:
        owner = place.owner.held if isinstance(place.owner, Space) else place.owner
        self._variables.setdefault((id(owner), place.name), _Variable(place, value, None))

    def _copy(self) -> None:
        """Copy what was found since."""
        found, self._found = self._found, []
        whole = [each for place, c in found for each in ((place, c), *_tables_of(place.owner, c))]
        self._containers += (Container.of(place, c) for place, c in whole)
        if torch._C._len_torch_dispatch_stack() == 0:  # nothing can be copied or written in a trace
            plain = (t for _, c in whole for _, t in _entries(c) if type(t) is Tensor and t.is_cpu)
            small = (t for t in plain if t.layout is torch.strided and t.nbytes <= budgets.STATE_BYTES)
            at = Place(None, "")
            self._tensors += (_SmallTensor(at, t, (t._version, t.detach().clone())) for t in small)

    # --- what is done with it ---

    def add(self, frame: types.FrameType) -> None:
        """Add what code can read that is about to run: variables by the names in it, also those of files, and
        what its functions close over."""
        code, before = frame.f_code, len(self._containers)
        with torch._C.DisableTorchFunction():
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
                if not K.is_known(space.name):
                    self.variables(space, list(names))
        self._copy()
        self._replace(self._containers[before:])

    def restore(self) -> None:
        kinds: tuple[Iterable[Any], ...] = (
            self._containers, self._variables.values(), self._others, self._tensors,
        )  # fmt: skip
        for kept in itertools.chain(*kinds):
            if kept.is_another():  # if not, other threads may read it
                kept.put_back()

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

    def _replace(self, containers: Iterable[Container]) -> None:
        for _, container, copy in containers:
            for name, value in _entries(copy):
                if isinstance(value, Tensor) and self._replacement is not None:
                    container[name] = self._replacement(value)

    def is_generator(self, place: Place) -> bool:
        return any(each.place is place for each in self._others if isinstance(each, _Generator))

    def has_drawn(self) -> bool:
        """Whether a generator of random numbers has another state now."""
        return any(each.is_another() for each in self._others if isinstance(each, _Generator))

    def changed_attributes(self) -> list[Place]:
        """All attributes that are other objects now, and buffers that were there before."""
        found: list[Place] = []
        for (owner, whole), now, before in self._containers:
            held: Any = getattr(owner, "__dict__", None)
            is_buffers = isinstance(owner, nn.Module) and now is owner._buffers
            if not whole and (now is held or is_buffers):
                names = dict.fromkeys(before if is_buffers else (*before, *now))
                found += (Place(owner, n) for n in names if _differ(now.get(n, now), before.get(n, now)))
        return found

    def containers(self) -> set[int]:
        return {id(kept.value) for kept in self._containers}

    def first_change(self, weights: Mapping[int, int] = MappingProxyType({})) -> Place | None:
        """The first attribute or variable whose value is another one now, or whose container has changed.
        `weights`: from the identity of each weight to that of the one that it stands for, during a trace."""

        def is_another(now: Any, before: Any) -> bool:
            """Another one that was there before is another one even if it has the same contents."""
            swapped = now is not before and id(now) in self.seen and not isinstance(now, K.BY_VALUE)
            self.swapped |= swapped
            return swapped or _differ(now, before, weights)

        for kept in self._containers:
            place, held, was = kept
            if not place.name and isinstance(held, dict):
                for name in (*was, *(n for n in held if n not in was)):
                    counts = not K.is_of_stand_ins(name)
                    if counts and is_another(held.get(name, held), was.get(name, held)):
                        return Place(place.owner, str(name))
            elif kept.is_another() and _differ(held, was, weights):
                return place
        variables = (v.place for v in self._variables.values() if is_another(v.now(), v.value))
        others = (kept.place for kept in self._others if kept.is_another())
        return next(itertools.chain(variables, others), None)


class _Refused:
    """Stands for an iterator, and refuses to be advanced."""

    def __init__(self, refuse: Callable[[Place], None], place: Place) -> None:
        self._refuse, self._place = refuse, place

    def __iter__(self) -> "_Refused":
        return self

    def __next__(self) -> Any:
        self._refuse(self._place)
        raise ValueError("a trace cannot advance an iterator")


def _entries(container: Any) -> list[tuple[Any, Any]]:
    """The entries that can be set, with their keys."""
    if isinstance(container, dict):
        return list(container.items())
    return list(enumerate(container)) if isinstance(container, (list, deque)) else []


def _tables_of(owner: Any, held: Any) -> Iterator[tuple[Place, Any]]:
    """If these are the attributes of a module: its tables of weights, of submodules and of hooks."""
    if isinstance(owner, nn.Module) and held is vars(owner):
        for name in K.MODULES_TABLES:
            table = held.get(name)
            if isinstance(table, (dict, set)):
                yield Place(owner, "" if name in K.NAMING else name), table


def _differ(now: Any, before: Any, weights: Mapping[int, int] = MappingProxyType({})) -> bool:
    """Whether a value is another one, and not a copy with the same contents."""
    return now is not before and fingerprint([now], weights=weights) != fingerprint([before], weights=weights)
