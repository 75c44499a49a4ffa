"""Values that depend on weights alone, computed before the first call and again when a weight changes.

Weights are known by their address and version, as buffers are (`capture/guards.py`): what is written
through `.data` is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import ProgramGraph

Fetch = Callable[[Sequence[Tensor]], Tensor]


class Ahead:
    """The values of `graph`, whose inputs `fetch` looks up."""

    def __init__(self, graph: ProgramGraph, fetch: Sequence[Fetch]) -> None:
        self.graph, self.fetch = graph, list(fetch)
        self._known: list[Any] = []
        self.current: dict[str, Tensor] = {}
        """What `values` gave last."""

    def values(self, run: Callable[[fx.GraphModule], fx.Interpreter] | None = None) -> dict[str, Tensor]:
        """By the names of the inputs that stand for them. With `run`, computed anew in its way."""
        weights = [fetch(()) for fetch in self.fetch]
        if run is not None:
            return self._named(run(self.graph.module).run(*weights))
        known = [(w.data_ptr(), w._version, w.dtype, w.device, w.shape) for w in weights]
        if known != self._known:
            with torch.no_grad():
                self.current = self._named(self.graph.module(*weights))
            self._known = known
        return self.current

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"ahead{number}": value for number, value in enumerate(values)}
