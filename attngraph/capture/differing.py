"""Attributes that differ between the modules of a class, and which of them a call reads.

The layers of a model often know their number, and few forwards read it. A call that does not read such an
attribute does not depend on it. Reads are noticed where `attributes.can_be_watched` says that they can; else
the attribute counts as read. Used by `equal_modules.py`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from attngraph.capture.attributes import can_be_watched, in_class
from attngraph.capture.state import PLAIN, LeftOut, Place, exact

_UNSET = object()
Named = frozenset[tuple[str, str]]
"""Attributes of modules of one class: the path of a submodule, and the name."""


class Reads:
    """Notes, while it is entered, when attributes that differ are read."""

    def __init__(self) -> None:
        self.last: dict[tuple[int, str], int] = {}
        self._ticks = itertools.count(1)
        self._watched: set[tuple[type, str]] = set()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Reads:
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()

    def of(self, modules: Sequence[nn.Module]) -> Differing:
        """The attributes that differ between these modules of one class; from now on their reads are
        noted."""
        found = _differing(modules)
        seen = {place for place, owners in found.items() if all(self._watch(o, place[1]) for o in owners)}
        return Differing(self, frozenset(seen))

    def _watch(self, owner: nn.Module, name: str) -> bool:
        """Note reads of an attribute from now on, if that is possible."""
        kind = type(owner)
        if (kind, name) not in self._watched:
            if not can_be_watched(Place(owner, name)):
                return False
            self._watched.add((kind, name))
            self._open.enter_context(in_class(kind, name, _Noted(name, kind, self)))
        return True

    def now(self) -> int:
        return next(self._ticks)

    def note(self, owner: Any, name: str) -> None:
        self.last[id(vars(owner)), name] = next(self._ticks)


class Differing:
    """The attributes that differ between the modules of one class and whose reads are noted."""

    def __init__(self, reads: Reads, names: Named) -> None:
        self._reads, self._names = reads, names

    def left_out(self, module: nn.Module, read: Named) -> LeftOut:
        """All of this module's but those that are read."""
        if len(read) == len(self._names):
            return frozenset()
        parts = dict(module.named_modules())
        return frozenset((id(parts[path]), name) for path, name in self._names - read if path in parts)

    def read(self, module: nn.Module, since: int, all_of_them: bool) -> Named:
        """Those that were read in this module since then, or all of them."""
        if all_of_them:
            return self._names
        parts, last = dict(module.named_modules()), self._reads.last
        return frozenset(
            (path, name)
            for path, name in self._names
            if path not in parts or last.get((id(vars(parts[path])), name), 0) > since
        )


class _Noted:
    """The attribute `name` of a class, whose reads are noted."""

    def __init__(self, name: str, kind: type, reads: Reads) -> None:
        self.name, self.reads = name, reads
        self.of_class = getattr(kind, name, _UNSET)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is not None:
            self.reads.note(owner, self.name)
        found = self.of_class if owner is None else vars(owner).get(self.name, self.of_class)
        if found is _UNSET:
            raise AttributeError(self.name)
        return found

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self.name] = value

    def __delete__(self, owner: Any) -> None:
        if vars(owner).pop(self.name, _UNSET) is _UNSET:
            raise AttributeError(self.name)


def _differing(modules: Sequence[nn.Module]) -> dict[tuple[str, str], list[nn.Module]]:
    """The attributes whose plain values are not the same in all of these modules, with the owners of each."""
    values: dict[tuple[str, str], set[Any]] = {}
    owners: dict[tuple[str, str], list[nn.Module]] = {}
    for module in modules:
        for path, part in module.named_modules():
            for name, value in vars(part).items():
                if isinstance(value, (*PLAIN, float)) and name != "training":
                    values.setdefault((path, name), set()).add(exact(value))
                    owners.setdefault((path, name), []).append(part)
    return {
        place: owners[place]
        for place, found in values.items()
        if len(found) > 1 or len(owners[place]) < len(modules)
    }
