"""One reduction for a sum of two: a + b of all ranks is the sum over ranks of each rank's a + b.

Blocks that compute attention and MLP side by side add up the results of both, and embeddings of tokens, often
times a number, and of positions are added; so one reduction is enough.
"""

from __future__ import annotations

import dataclasses

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
        one, other = map(_summed, node.args)
        if one is None or other is None:
            continue
        wide = node.meta["val"].shape
        builder = Builder(graph, node)
        both = builder.call(aten.add.Tensor, *(_own_part(side, builder) for side in (one, other)))
        if list(map(str, both.meta["val"].shape)) != list(map(str, wide)):
            builder.discard()
            continue
        found = builder.call(ALL_REDUCE, both, one.reduction.args[1])
        for bias in (one.bias, other.bias):
            found = found if bias is None else builder.call(aten.add.Tensor, found, bias)
        node.replace_all_uses_with(found)
    graph.clean()


@dataclasses.dataclass
class _Summed:
    """A reduction times a number, to which a bias is added."""

    reduction: fx.Node
    factor: float | None = None
    bias: object = None


def _summed(value: object) -> _Summed | None:
    """What a value is, if it is such a sum over ranks and nothing else uses it; else None."""
    if not isinstance(value, fx.Node) or len(value.users) != 1 or value.kwargs:
        return None
    if value.target is ALL_REDUCE:
        return _Summed(value)
    if value.target not in (aten.add.Tensor, aten.mul.Tensor):
        return None
    for first, rest in (value.args, value.args[::-1]):
        if isinstance(first, fx.Node) and first.target is ALL_REDUCE and len(first.users) == 1:
            if value.target is aten.add.Tensor:
                return _Summed(first, bias=rest)
            return _Summed(first, factor=rest) if isinstance(rest, (int, float)) else None
    return None


def _own_part(side: _Summed, builder: Builder) -> object:
    """What this rank adds to the sum."""
    part = side.reduction.args[0]
    return part if side.factor is None else builder.call(aten.mul.Tensor, part, side.factor)
