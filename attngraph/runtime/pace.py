"""Never slower than the model itself: where it may be near, the first calls of each size are timed by turns.

No call is made to be measured: each answers one of the user's, as both can. The graph's first call compiles,
and is not counted. What took less time serves from then on. Where one is far ahead after a turn of each, the
other gets no second one.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from attngraph.ir import budgets

TURNS, FAR, LEAST = 2, 1.5, 1.03
"""Calls of each that are timed; a ratio that one turn decides; by how much the model must be ahead."""


@dataclasses.dataclass
class _Timed:
    """What calls of one size took, in seconds, by the graph and by the model."""

    warm: bool = False
    graph: list[float] = dataclasses.field(default_factory=list)
    model: list[float] = dataclasses.field(default_factory=list)
    by_model: bool | None = None

    def decide(self) -> None:
        if not self.model or len(self.model) < len(self.graph):
            return
        graph, model = min(self.graph), min(self.model)
        if len(self.model) == TURNS or graph > FAR * model or model > FAR * graph:
            self.by_model = graph > LEAST * model


class Paces:
    """Who serves the calls of each size: `key` tells sizes apart."""

    def __init__(self) -> None:
        self._of: dict[Any, _Timed] = {}

    def serve(self, key: Any, graph: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """The result of a call, from the one or the other."""
        timed = self._of.get(key)
        if timed is None:
            if len(self._of) >= budgets.SMALL_CALLS_KEPT:
                self._of.clear()
            timed = self._of[key] = _Timed()
        if timed.by_model is not None:
            return model() if timed.by_model else graph()
        if not timed.warm:
            timed.warm = True
            return graph()
        taken, run = (timed.model, model) if len(timed.graph) > len(timed.model) else (timed.graph, graph)
        start = time.perf_counter()
        result = run()
        taken.append(time.perf_counter() - start)
        timed.decide()
        return result

    @property
    def is_deciding(self) -> bool:
        """Whether calls of some size are still timed."""
        return any(timed.by_model is None for timed in list(self._of.values()))

    def slower(self) -> tuple[tuple[float, float], ...]:
        """The times of graph and model, in milliseconds, of sizes at which the model itself serves."""
        found = (t for t in list(self._of.values()) if t.by_model)
        return tuple((1e3 * min(t.graph), 1e3 * min(t.model)) for t in found)
