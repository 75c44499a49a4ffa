"""The graphs that a compiled model keeps, by what they are valid for; the least recently used are dropped."""

from __future__ import annotations

import collections
from collections.abc import Sequence, ValuesView
from typing import Any

from torch import Tensor

from attngraph.ir import budgets
from attngraph.runtime.executable import Executable


class Graphs:
    """Executables by the key of the calls that they serve (`capture.guards.call_key`)."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[Any, list[Executable]] = collections.OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def values(self) -> ValuesView[list[Executable]]:
        return self._kept.values()

    def latest(self) -> Executable | None:
        """The graph that was traced last."""
        return next(reversed(self._kept.values()))[-1] if self._kept else None

    def nearest_key(self, key: Any) -> Any:
        """The key that differs from this one in the fewest entries, of these the latest; None without
        graphs."""
        kept = [(sum(a != b for a, b in zip(known, key, strict=True)), known) for known in self._kept]
        return min(reversed(kept), key=lambda entry: entry[0])[1] if kept else None

    def find(self, key: Any, tensors: Sequence[Tensor]) -> Executable | None:
        """The graph that serves a call of this key with these tensors."""
        for executable in reversed(self._kept.get(key, ())):
            if executable.accepts(tensors):
                return executable
        return None

    def of(self, key: Any) -> Sequence[Executable]:
        """All graphs of this key."""
        return self._kept.get(key, ())

    def keep(self, key: Any, found: Executable) -> None:
        """Keep a graph, and drop the least recently used one if there are too many."""
        self._kept.setdefault(key, []).append(found)
        self._kept.move_to_end(key)
        while len(self) > budgets.GRAPHS_KEPT:
            oldest = next(iter(self._kept))
            self._kept[oldest].pop(0)
            if not self._kept[oldest]:
                del self._kept[oldest]
