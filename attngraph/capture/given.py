"""What a forward changes in objects that it is given, such as a cache of keys and values.

What it sets there is one more result of the graph, which each call sets on its own objects. A number that
follows from the one before is no such result, nor is a list that grows: both are part of a call's key, so
each call would need another graph. Used by `flat.py`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.structure import attributes_of, flatten, is_value

Path = tuple[tuple[str, Any], ...]
"""Steps from `(args, kwargs)` to an object: ("item", key) or ("attribute", name)."""
ABSENT = object()
_WHOLE = slice(None)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclasses.dataclass(frozen=True)
class Set:
    """What forward set: the path of the object, the attribute, key or slice of it, the value, and what was
    there before (`ABSENT`: nothing). `grows`: a list or dictionary that held something has another length."""

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
        if self.value is ABSENT or self.grows:
            return False
        numbers, before = ([x for x in flatten(v)[0] if _is_number(x)] for v in (self.value, self.before))
        return numbers == before or not (before or any(isinstance(x, _SYMBOLIC) for x in numbers))


class Given:
    """The objects, lists and dictionaries among a call's arguments, by their places."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.paths: dict[int, Path] = {}
        self.shared = False
        """Whether one is at two places."""
        self._held: list[tuple[Path, Any, Any]] = []
        self._walk((args, kwargs), ())

    def _walk(self, value: Any, path: Path) -> None:
        if is_value(value) or isinstance(value, (Tensor, nn.Module, type)):
            return
        inner: list[tuple[tuple[str, Any], Any]] = []
        if isinstance(value, (list, tuple)):
            inner = [(("item", n), part) for n, part in enumerate(value)]
        elif isinstance(value, dict):
            inner = [(("item", key), part) for key, part in value.items()]
        elif hasattr(value, "__dict__") and (attributes := attributes_of(value)) is not None:
            inner = [(("attribute", name), part) for name, part in attributes.items()]
        else:
            return
        if not isinstance(value, tuple):
            self.shared |= id(value) in self.paths
            if id(value) in self.paths:
                return
            self.paths[id(value)] = path
            self._held.append((path, value, _contents(value)))
        for step, part in inner:
            self._walk(part, (*path, step))

    def taken_back(self) -> list[Set]:
        """What has been set since; all is put back as it was."""
        found: list[Set] = []
        for path, value, before in self._held:
            now = _contents(value)
            if changes := list(_changes(before, now)):
                grows = isinstance(value, (list, dict)) and 0 < len(before) != len(now)
                found += (Set(path, *change, grows) for change in changes)
                _put_back(value, before)
        return found


def holder(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    """What has the attributes or entries of the object at a place: the object's dictionary, or itself."""
    value = at(args, kwargs, path)
    return value if isinstance(value, (list, dict)) else vars(value)


def at(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    """The object at a place."""
    value: Any = (args, kwargs)
    for kind, key in path:
        value = vars(value)[key] if kind == "attribute" else value[key]
    return value


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (int, float, complex, *_SYMBOLIC)) and not isinstance(leaf, bool)


def _contents(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(_table(value))


def _table(value: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = value if isinstance(value, dict) else vars(value)
    return found


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, list):
        value[:] = before
    else:
        _table(value).clear()
        _table(value).update(before)


def _changes(before: Any, now: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The keys at which contents differ, with what is there now and what was; a list as a whole."""
    if isinstance(now, list):
        if [*map(id, now)] != [*map(id, before)]:
            yield _WHOLE, now, before
        return
    for key in (*now, *(k for k in before if k not in now)):
        new, old = now.get(key, ABSENT), before.get(key, ABSENT)
        if new is not old:
            yield key, new, old
