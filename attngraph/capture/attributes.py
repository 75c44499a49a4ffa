"""What a forward sets anew in every call: results, not state.

Attributes of the model (`self.attention_weights = p`): a first trace finds which change. In a second one they
are watched: if the forward does not read an attribute before it sets it, no call depends on the one before,
so what it is set to is one more result of the graph, and the executable sets the attribute after each call.
An attribute that is read first is state (a counter, a table for later calls) and remains a side effect. The
buffers of a module are watched as its attributes are, where they were registered before.

What it changes in objects that it is given, such as a cache of keys and values, is one more result of the
graph, too, which each call sets on its own objects. A number that follows from the one before is no such
result, nor is a list that grows: both are part of a call's key, so each call would need another graph.
"""

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.instead import replaced
from attngraph.capture.lines import room_of
from attngraph.capture.state.kinds import MISSING, Place
from attngraph.capture.state.snapshot import Container
from attngraph.capture.structure import TreeSpec, attributes_of, flatten, is_value, parts_of

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
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
        kinds = ("" if isinstance(leaf, (Tensor, *_SYMBOLIC)) else type(leaf).__name__ for leaf in leaves)
        told = (k and f"{k} {v!r}" if is_value(v) else k for k, v in zip(kinds, leaves, strict=True))
        return Described(tree, tuple(told))

    def agrees(self, other: "Described") -> bool:
        """Whether both are of one structure and equal in leaves that both traces took as plain values."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return self.tree == other.tree and all(a == b or not (a and b) for a, b in pairs)


Settings = Mapping[Place, Described]
"""What a trace found attributes to be set to."""


def holder_of(owner: Any, name: str) -> dict[str, Any]:
    """The dictionary that has the attribute: that of the object's attributes, or of a module's buffers."""
    own: dict[str, Any] = vars(owner)
    return owner._buffers if isinstance(owner, nn.Module) and name in owner._buffers else own


def can_be_watched(place: Place) -> bool:
    """Whether reading and setting this attribute can be noticed: its class has nothing else of that name."""
    kind: Any = type(place.owner)
    if kind.__flags__ & _IMMUTABLE or kind.__hash__ is not object.__hash__:
        return False
    return not any(hasattr(vars(k).get(place.name), "__get__") for k in kind.__mro__)


class Watch:
    """Keeps what attributes are set to while it is entered, instead of setting them.

    Args:
        places: the attributes, each as `can_be_watched` says.
        refuse: is called with an attribute that is read before it is set, or deleted, and whether
            torch.compile notices that.
        reads: whether attributes may be read before; such are in `read`, and have their old values until they
            are set.
    """

    def __init__(self, places: Sequence[Place], refuse: Callable[[Place, bool], None], reads: bool) -> None:
        self.places, self.refuse, self.reads = places, refuse, reads
        self.found: dict[Place, Any] = {}
        self.read: set[Place] = set()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Watch":
        by_class = collections.defaultdict[tuple[type, str], dict[int, Place]](dict)
        tables = collections.defaultdict[int, dict[str, Place]](dict)
        whole = collections.defaultdict[type, dict[int, Place]](dict)
        for place in self.places:
            if holder_of(*place) is not vars(place.owner):
                tables[id(vars(place.owner))][place.name] = place
            else:  # stand-ins that torch.export makes of modules share the dictionary of the original
                by_class[type(place.owner), place.name][id(vars(place.owner))] = place
        for (kind, name), watched in by_class.items():
            watching = _Watched(name, kind, watched, self)
            self._open.enter_context(replaced(kind, name, watching, adds=True))
            whole[kind] |= watched
        for kind, watched in whole.items():
            get: Any = kind.__getattribute__
            asked = _asks_whole(get, watched, self)
            self._open.enter_context(replaced(kind, "__getattribute__", asked, adds=True))
        for named in tables.values():
            owner = next(iter(named.values())).owner
            self._open.enter_context(_in_module(owner, _Buffers(owner._buffers, named, self)))
        return self

    def value(self, place: Place, before: Any) -> Any:
        """What an attribute is that is read now; `before`: what it was before the call. Raises ReadFirst if
        it has not been set, and may not be read before."""
        if place in self.found:
            return self.found[place]
        self.read.add(place)
        return before if self.reads else self.refused(place)

    def looked_inside(self, place: Place) -> None:
        """The dictionary that has the attribute is asked for. Torch.compile does not notice that either."""
        self.read.add(place)
        if not self.reads:
            self.refused(place, splits=False)

    def refused(self, place: Place, splits: bool = True) -> Any:
        self.refuse(place, splits)
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


def _asks_whole(get: Callable[[Any, str], Any], watched: Mapping[int, Place], watch: Watch) -> Any:
    """What gets the attributes of a class while some of its objects are watched. The dictionary of such an
    object (`self.__dict__`, `vars(self)`) has its watched attributes as they were before the call: code that
    asks for it reads them. (Torch's code asks for it on each access to something else.)"""

    def asked(owner: Any, name: str) -> Any:
        found = get(owner, name)
        place = watched.get(id(found)) if name == "__dict__" else None
        if place is not None and room_of(sys._getframe(1)) not in ("torch", "attngraph"):
            watch.looked_inside(place)
        return found

    return asked


class _Watched:
    """The attribute `name` of a class while some of its objects are watched."""

    def __init__(self, name: str, kind: type, watched: Mapping[int, Place], watch: Watch) -> None:
        self.name, self.watched, self.watch = name, watched, watch
        self.of_class = getattr(kind, name, MISSING)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        place = None if owner is None else self.watched.get(id(vars(owner)))
        before = self.of_class if owner is None else vars(owner).get(self.name, self.of_class)
        found = before if place is None else self.watch.value(place, before)
        if found is MISSING:
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
        if vars(owner).pop(self.name, MISSING) is MISSING:
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
        stack += part if isinstance(part, (set, frozenset)) else (inner for _, inner in parts_of(part))
        if not isinstance(part, (tuple, frozenset)):
            yield id(part)


# --- objects among the arguments ---

Path = tuple[tuple[str, Any], ...]
"""Steps from `(args, kwargs)` to an object: ("item", key) or ("attribute", name)."""
_WHOLE = slice(None)


@dataclasses.dataclass(frozen=True)
class Set:
    """What forward set: the path of the object, the attribute, key or slice of it, the value, and what was
    there before. `grows`: a list or dictionary that held something has another length."""

    path: Path
    key: Any
    value: Any
    before: Any
    grows: bool

    @property
    def label(self) -> str:
        """The place as code writes it."""
        steps = [f".{k}" if kind == "attribute" else f"[{k!r}]" for kind, k in self.path[2:]]
        root = str(self.path[1][1]) if len(self.path) > 1 else ""
        last = f".{self.key}" if isinstance(self.key, str) else ""
        return f"{root if root.isidentifier() else f'arguments[{root}]'}{''.join(steps)}{last}"

    def can_be_repeated(self) -> bool:
        """Whether later calls may set it too. Numbers that follow from others, or from sizes, and the lengths
        of lists are part of the next call's key: each call would be traced anew."""
        if self.value is MISSING or self.grows:
            return False
        numbers, before = map(_numbers_in, (self.value, self.before))
        return numbers == before or not (before or any(isinstance(x, _SYMBOLIC) for x in numbers))


class Given:
    """The objects, lists and dictionaries among a call's arguments, by their places."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.paths: dict[int, Path] = {}
        self.shared = False
        """Whether one is at two places."""
        self._held: list[tuple[Path, Container]] = []
        self._walk((args, kwargs), ())

    def _walk(self, value: Any, path: Path) -> None:
        is_object = hasattr(value, "__dict__") and attributes_of(value) is not None
        if not is_object and not isinstance(value, (list, tuple, dict)):
            return
        if not isinstance(value, tuple):
            if id(value) in self.paths:
                self.shared = True
                return
            self.paths[id(value)] = path
            held = _entries_of(value)
            was = list(held) if isinstance(held, list) else dict(held)
            self._held.append((path, Container(Place(value, ""), held, was)))
        for step, part in parts_of(value):
            self._walk(part, (*path, step))

    def taken_back(self) -> list[Set]:
        """What has been set since; all is put back as it was."""
        found: list[Set] = []
        for path, kept in self._held:
            if changes := list(_changes(kept.was, kept.value)):
                is_object = kept.value is not kept.place.owner
                grows = not is_object and 0 < len(kept.was) != len(kept.value)
                found += (Set(path, *change, grows) for change in changes)
                kept.put_back()
        return found


def holder(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    """What has the attributes or entries of the object at a place: the object's dictionary, or itself."""
    return _entries_of(at(args, kwargs, path))


def _entries_of(value: Any) -> Any:
    return value if isinstance(value, (list, dict)) else vars(value)


def at(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    """The object at a place."""
    value: Any = (args, kwargs)
    for kind, key in path:
        value = vars(value)[key] if kind == "attribute" else value[key]
    return value


def _numbers_in(value: Any) -> list[Any]:
    kinds = (int, float, complex, *_SYMBOLIC)
    return [x for x in flatten(value)[0] if isinstance(x, kinds) and not isinstance(x, bool)]


def _changes(before: Any, now: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The keys at which contents differ, with what is there now and what was; a list as a whole."""
    if isinstance(now, list):
        if [*map(id, now)] != [*map(id, before)]:
            yield _WHOLE, [*now], before
        return
    for key in (*now, *(k for k in before if k not in now)):
        new, old = now.get(key, MISSING), before.get(key, MISSING)
        if new is not old:
            yield key, new, old
