"""Attributes that a forward sets anew in every call (`self.attention_weights = p`): results, not state.

A first trace finds which attributes change. In a second one they are watched: if the forward does not read
an attribute before it sets it, no call depends on the one before, so what it is set to is one more result of
the graph, and the executable sets the attribute after each call. An attribute that is read first is state
(a counter, a table for later calls) and remains a side effect. The buffers of a module are watched as its
attributes are, where they were registered before. Used by `trace.py` and `side_effects.py`.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.instead import replaced
from attngraph.capture.state.kinds import Place
from attngraph.capture.structure import TreeSpec, attributes_of, flatten, is_value

_UNSET = object()
_IMMUTABLE = 1 << 8
"""CPython's flag of classes whose attributes cannot be set."""


class ReadFirst(Exception):
    """The forward reads a watched attribute that it has not set yet, or deletes it; the trace stops here."""


@dataclasses.dataclass(frozen=True)
class Described:
    """What an attribute was set to in one trace, as far as another trace must find the same: the structure,
    and the leaves that are neither tensors nor sizes."""

    tree: TreeSpec
    leaves: tuple[str, ...]

    @staticmethod
    def of(value: Any) -> "Described":
        leaves, tree = flatten(value)
        return Described(tree, tuple(map(_described, leaves)))

    def agrees(self, other: "Described") -> bool:
        """Whether both are of one structure and equal in leaves that both traces took as plain values."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return self.tree == other.tree and all(a == b or not (a and b) for a, b in pairs)


def _described(leaf: Any) -> str:
    is_symbolic = isinstance(leaf, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    return "" if is_symbolic else f"{type(leaf).__name__} {leaf!r}" if is_value(leaf) else type(leaf).__name__


Settings = Mapping[Place, Described]
"""What a trace found attributes to be set to."""


def holder_of(owner: Any, name: str) -> dict[str, Any]:
    """The dictionary that has the attribute: that of the object's attributes, or of a module's buffers."""
    own: dict[str, Any] = vars(owner)
    return owner._buffers if isinstance(owner, nn.Module) and name in owner._buffers else own


def can_be_watched(place: Place) -> bool:
    """Whether reading and setting this attribute can be noticed: its class has nothing else of that name, and
    its methods do not look into the dictionary of attributes."""
    kind: Any = type(place.owner)
    if kind.__flags__ & _IMMUTABLE or kind.__hash__ is not object.__hash__ or _looks_inside(kind):
        return False
    return not any(hasattr(vars(k).get(place.name), "__get__") for k in kind.__mro__)


@functools.lru_cache(maxsize=4096)
def _looks_inside(kind: type) -> bool:
    """Whether a method of the class uses `__dict__` or `vars`; torch's, and Python's special ones, do not
    count."""
    own = (k for k in kind.__mro__ if k is not object and not k.__module__.startswith("torch."))
    methods = (getattr(m, "fget", m) for k in own for n, m in vars(k).items() if not n.startswith("__"))
    codes = (getattr(inspect.unwrap(m), "__code__", None) for m in methods if callable(m))
    return any({"__dict__", "vars"} & set(code.co_names) for code in codes if code is not None)


class Watch:
    """Keeps what attributes are set to while it is entered, instead of setting them.

    Args:
        places: the attributes, each as `can_be_watched` says.
        refuse: is called with an attribute that is read before it is set, or deleted.
        reads: whether attributes may be read before; such are in `read`, and have their old values until they
            are set.
    """

    def __init__(self, places: Sequence[Place], refuse: Callable[[Place], None], reads: bool) -> None:
        self.places, self.refuse, self.reads = places, refuse, reads
        self.found: dict[Place, Any] = {}
        self.read: set[Place] = set()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Watch":
        by_class = collections.defaultdict[tuple[type, str], dict[int, Place]](dict)
        tables = collections.defaultdict[int, dict[str, Place]](dict)
        for place in self.places:
            if holder_of(*place) is not vars(place.owner):
                tables[id(vars(place.owner))][place.name] = place
            else:  # stand-ins that torch.export makes of modules share the dictionary of the original
                by_class[type(place.owner), place.name][id(vars(place.owner))] = place
        for (kind, name), watched in by_class.items():
            watching = _Watched(name, kind, watched, self)
            self._open.enter_context(replaced(kind, name, watching, adds=True))
        for named in tables.values():
            owner = next(iter(named.values())).owner
            self._open.enter_context(_in_module(owner, _Buffers(owner._buffers, named, self)))
        return self

    def value(self, place: Place, before: Any) -> Any:
        """What an attribute is that is read now; `before`: what it was before the call.

        Raises:
            ReadFirst: it has not been set, and may not be read before.
        """
        if place in self.found:
            return self.found[place]
        self.read.add(place)
        return before if self.reads else self.refused(place)

    def refused(self, place: Place) -> Any:
        """Refuse an attribute that is read first, or deleted; raises ReadFirst."""
        self.refuse(place)
        raise ReadFirst(place.name)

    def __exit__(self, *problem: object) -> None:
        self._open.close()


@contextlib.contextmanager
def _in_module(owner: nn.Module, buffers: "_Buffers") -> Iterator[None]:
    def register(name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """nn.Module's own reads a buffer before it sets it."""
        if name in buffers.watched:
            buffers[name] = tensor
        else:
            nn.Module.register_buffer(owner, name, tensor, persistent)

    attributes = vars(owner)
    attributes |= {"_buffers": buffers, "register_buffer": register}
    try:
        yield
    finally:
        attributes["_buffers"] = buffers.held
        del attributes["register_buffer"]


class _Watched:
    """The attribute `name` of a class while some of its objects are watched."""

    def __init__(self, name: str, kind: type, watched: Mapping[int, Place], watch: Watch) -> None:
        self.name, self.watched, self.watch = name, watched, watch
        self.of_class = getattr(kind, name, _UNSET)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        place = None if owner is None else self.watched.get(id(vars(owner)))
        before = self.of_class if owner is None else vars(owner).get(self.name, self.of_class)
        found = before if place is None else self.watch.value(place, before)
        if found is _UNSET:
            raise AttributeError(self.name)
        return found

    def __set__(self, owner: Any, value: Any) -> None:
        place = self.watched.get(id(vars(owner)))
        if place is None:
            vars(owner)[self.name] = value
        else:
            self.watch.found[place] = value

    def __delete__(self, owner: Any) -> None:
        place = self.watched.get(id(vars(owner)))
        if place is not None:
            self.watch.refused(place)
        if vars(owner).pop(self.name, _UNSET) is _UNSET:
            raise AttributeError(self.name)


class _Buffers(dict[str, Any]):
    """The buffers of a module while some are watched. Who goes through them (`next(self.buffers())`) reads
    those that are reached."""

    def __init__(self, held: dict[str, Any], watched: Mapping[str, Place], watch: Watch) -> None:
        super().__init__(held)
        self.held, self.watched, self.watch = held, watched, watch

    def __getitem__(self, name: str) -> Any:
        place = self.watched.get(name)
        return self.held[name] if place is None else self.watch.value(place, self.held[name])

    def __setitem__(self, name: str, value: Any) -> None:
        place = self.watched.get(name)
        if place is None:
            super().__setitem__(name, value)
            self.held[name] = value
        else:
            self.watch.found[place] = value

    def __delitem__(self, name: str) -> None:
        self.watch.refused(next(iter(self.watched.values())))

    def values(self) -> Any:
        return (self[name] for name in self.held)

    def items(self) -> Any:
        return ((name, self[name]) for name in self.held)


def containers(value: Any) -> Iterator[int]:
    """The identities of the lists, dictionaries and other objects in a value that can be changed in place."""
    stack, seen = [value], set()
    while stack:
        part = stack.pop()
        if id(part) in seen or is_value(part) or isinstance(part, (Tensor, nn.Module, type)):
            continue
        seen.add(id(part))
        inner = part.values() if isinstance(part, dict) else part
        if isinstance(part, (list, tuple, set, frozenset, dict)):
            stack += inner
        else:
            stack += (attributes_of(part) or {}).values()
        if not isinstance(part, (tuple, frozenset)):
            yield id(part)
