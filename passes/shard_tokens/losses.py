"""The mean of tokens' losses, written as a sum of losses over their number.

Each rank then computes the losses of its own tokens, and what is gathered is one number for each token, not
the logits of all.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from attngraph.ir.graph import ProgramGraph, arguments, is_size
from attngraph.meaning.check.check import Checks
from attngraph.passes.proposal import Proposal

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
        given = arguments(node)
        if given["weight"] is not None or given["target"].meta["val"].is_floating_point():
            continue
        if given["reduction"] in (_MEAN, _SUM):
            with Proposal(graph, node, checks) as proposal:
                found = proposal.trace(functools.partial(_summed, tuple(given)), *given.values())
                proposal.replace(node, found, [n for n in node.all_input_nodes if not is_size(n)])
    graph.clean()


def _summed(names: Sequence[str], *values: Any) -> Any:
    """The loss as a sum."""
    given = dict(zip(names, values, strict=True))
    losses = _CROSS_ENTROPY(*{**given, "reduction": _NONE}.values())
    total = losses.sum()
    if given["reduction"] == _SUM:
        return total
    return total / aten.ne.Scalar(given["target"], given["ignore_index"]).sum().to(losses.dtype)
