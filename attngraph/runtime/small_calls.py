"""Calls that are too small to gain from fusing: the model itself runs them.

A fused attention saves what its scores cost to write and to read back. With few scores that is less than what
an operation of ours costs to call: on the CPU a training step with 65,536 scores per attention takes up to
twice as long as the model's own operations, and with a million it is even at worst (docs/benchmarks.md
has the figures). The model's own result is the right one by definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch import Tensor

from attngraph.capture.guards import ShapeGuard, size_value
from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph

Scores = Callable[[Sequence[Tensor]], float]


class SmallCalls:
    """The shapes of calls that run the model itself, and how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self._shapes: set[Any] = set()

    def __contains__(self, shapes: Any) -> bool:
        return shapes in self._shapes

    def add(self, shapes: Any) -> None:
        self.count += 1
        if len(self._shapes) >= budgets.SMALL_CALLS_KEPT:
            self._shapes.clear()
        self._shapes.add(shapes)


def scores_per_attention(graph: ProgramGraph, sizes: ShapeGuard) -> Scores | None:
    """The function that gives, for a call's tensors, the mean number of scores (queries times keys, of all
    heads and rows) of the graph's attentions; 0 without any. None for graphs that are not on the CPU, where
    this was not measured."""
    inputs = (node.meta.get("val") for node in graph.placeholders())
    if any(isinstance(t, Tensor) and t.device.type != "cpu" for t in inputs):
        return None
    counts, attentions = [], 0
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") != "attngraph" or len(node.args) < 2:
            continue
        q, k = (getattr(a, "meta", {}).get("val") for a in node.args[:2])
        if not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.ndim != 4 or k.ndim != 4:
            continue
        attentions += 1
        counts.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
    formulas = [getattr(getattr(c, "node", None), "expr", sympy.Integer(0)) for c in counts]
    fixed = sum(c for c in counts if isinstance(c, int))
    total = sympy.Add(*formulas) + fixed
    known: dict[tuple[int, ...], float] = {}

    def scores(tensors: Sequence[Tensor]) -> float:
        bound = sizes.bind(tuple(t.shape for t in tensors)) or {}
        key = tuple(bound.values())
        if key not in known:
            known[key] = size_value(total, bound) / max(attentions, 1)
        return known[key]

    return scores
