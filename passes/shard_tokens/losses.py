"""The mean of tokens' losses, written as a sum of losses over their number.

Each rank then computes the losses of its own tokens, and what is gathered is one number for each token, not
the logits of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph, is_size
from attngraph.meaning.check.once import Checks
from attngraph.passes.build import Builder

aten = torch.ops.aten
_CROSS_ENTROPY = aten.cross_entropy_loss.default
_NONE, _MEAN, _SUM = range(3)
"""PyTorch's numbers of reductions."""
_EXACT = (torch.float32, torch.float64)
"""In other dtypes the losses of tokens would be rounded before they are added."""


def sum_losses(graph: ProgramGraph) -> None:
    """Write cross entropies as sums of tokens' losses, where that is proved to be the same."""
    checks = Checks(graph)
    for node in list(graph.graph.nodes):
        if node.target is not _CROSS_ENTROPY or node.meta["val"].dtype not in _EXACT:
            continue
        given: dict[str, Any] = {
            a.name: node.args[n] if n < len(node.args) else node.kwargs.get(a.name, a.default_value)
            for n, a in enumerate(_CROSS_ENTROPY._schema.arguments)
        }
        target = given["target"]
        if given["weight"] is not None or target.meta["val"].is_floating_point():
            continue
        builder = Builder(graph, node)
        found = _summed(builder, given)
        leaves = [n for n in node.all_input_nodes if not is_size(n)]
        if found is None or checks.same_value(node, found, leaves).problem:
            builder.discard()
            continue
        node.replace_all_uses_with(found)
    graph.clean()


def _summed(builder: Builder, given: dict[str, Any]) -> fx.Node | None:
    """The loss as a sum; None where it is none."""
    reduction, target = given["reduction"], given["target"]
    if reduction not in (_MEAN, _SUM):
        return None
    losses = builder.call(_CROSS_ENTROPY, *{**given, "reduction": _NONE}.values())
    total = builder.call(aten.sum.default, losses)
    if reduction == _SUM:
        return total
    counted = builder.call(aten.ne.Scalar, target, given["ignore_index"])
    number = builder.call(aten.sum.default, counted)
    number = builder.call(aten._to_copy.default, number, dtype=losses.meta["val"].dtype)
    return builder.call(aten.div.Tensor, total, number)
