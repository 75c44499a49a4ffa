"""One reduction for a sum of two: a + b of all ranks is the sum over ranks of each rank's a + b.

Blocks that compute attention and MLP side by side add up the results of both, and embeddings of tokens and of
positions are added; so one reduction is enough.
"""

from __future__ import annotations

import torch
from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops.collectives import ALL_REDUCE
from attngraph.passes.build import Builder

aten = torch.ops.aten


def merge_sums(graph: ProgramGraph) -> None:
    """Merge reductions whose results are added."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        sides = [_sum_and_rest(a) for a in node.args]
        if any(s is None for s in sides):
            continue
        (one, its_bias), (other, other_bias) = sides  # type: ignore[misc]
        wide = node.meta["val"].shape
        builder = Builder(graph, node)
        both = builder.call(aten.add.Tensor, one.args[0], other.args[0])
        if list(map(str, both.meta["val"].shape)) != list(map(str, wide)):
            builder.discard()
            continue
        found = builder.call(ALL_REDUCE, both, one.args[1])
        for bias in (its_bias, other_bias):
            found = found if bias is None else builder.call(aten.add.Tensor, found, bias)
        node.replace_all_uses_with(found)
    graph.clean()


def _sum_and_rest(value: object) -> tuple[fx.Node, object] | None:
    """A reduction without other uses, and what is added to it; None for another value."""
    if not isinstance(value, fx.Node) or len(value.users) != 1:
        return None
    if value.target is ALL_REDUCE:
        return value, None
    if value.target is aten.add.Tensor and not value.kwargs:
        for first, rest in (value.args, value.args[::-1]):
            if isinstance(first, fx.Node) and first.target is ALL_REDUCE and len(first.users) == 1:
                return first, rest
    return None
