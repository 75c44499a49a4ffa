"""The graphs that a compiled model keeps, by what they are valid for; the least recently used are dropped.

Where there are graphs and none serves a call, it is told why.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence, ValuesView
from typing import Any

from torch import Tensor

from attngraph.capture.guards import change_between, change_of_sizes
from attngraph.capture.state.scope import Scope
from attngraph.ir import budgets
from attngraph.runtime.executable import Executable

log = logging.getLogger(__name__)
KeyOf = Callable[[Scope], Any]
"""Gives a call's key in a scope."""


class Graphs:
    """Executables by the calls that they serve. A graph depends on what the code that its trace ran can read
    (`captured.scope`), so it is kept under `key_of(scope)`, where `key_of` gives a call's key
    (`capture.guards.call_key`) in a scope."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[Any, list[Executable]] = collections.OrderedDict()
        self.retraces: collections.Counter[str] = collections.Counter()
        """Why calls were traced again, and how often."""

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def values(self) -> ValuesView[list[Executable]]:
        return self._kept.values()

    def latest(self) -> Executable | None:
        """The graph that was traced last."""
        return next(reversed(self._kept.values()))[-1] if self._kept else None

    def _nearest_key(self, key: Any, scope: Scope) -> Any:
        """The key that differs from this one in the fewest entries, of these the latest; None without graphs
        of the same scope."""
        same = (known for other, known in self._kept if other == scope)
        kept = [(sum(a != b for a, b in zip(known, key, strict=True)), known) for known in same]
        return min(reversed(kept), key=lambda entry: entry[0])[1] if kept else None

    def find(self, key_of: KeyOf, tensors: Sequence[Tensor]) -> Executable | None:
        """The graph that serves a call with these tensors."""
        for scope in dict.fromkeys(scope for scope, _ in reversed(self._kept)):
            for executable in reversed(self._kept.get((scope, key_of(scope)), ())):
                if executable.accepts(tensors):
                    return executable
        return None

    def keep(self, key_of: KeyOf, found: Executable) -> None:
        """Keep a graph, and drop the least recently used one if there are too many."""
        scope = found.captured.scope
        key = scope, key_of(scope)
        self._kept.setdefault(key, []).append(found)
        self._kept.move_to_end(key)
        while len(self) > budgets.GRAPHS_KEPT:
            oldest = next(iter(self._kept))
            self._kept[oldest].pop(0)
            if not self._kept[oldest]:
                del self._kept[oldest]

    def tell_why(
        self, key_of: KeyOf, scope: Scope, model: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]
    ) -> None:
        """Count, and log, why none of the graphs serves a call; warn where one cause keeps coming."""
        key = key_of(scope)
        nearest = self._nearest_key(key, scope)
        if nearest is None:
            return
        found = change_between(nearest, key, model, leaves, scope)
        if found is None:
            found = change_of_sizes([g.sizes for g in self._kept.get((scope, key), ())], tensors)
        self.retraces[found.what] += 1
        count = self.retraces[found.what]
        log.info("traced again because of %s", found)
        if count == budgets.RETRACES_TOLD:
            log.warning(
                "traced again for the %dth time because of %s. Each change of it takes a trace, and at most "
                "%d graphs are kept. What to do: give what changes as a tensor, or keep it constant.",
                count, found, budgets.GRAPHS_KEPT,
            )  # fmt: skip
