"""Runs a graph for several ranks in one process, on the user's whole parameters, gradients included.

Every rank gets its own copy of what all have whole, so that the gradient which the user sees is the one that
a rank would compute, not the sum of all ranks' (`ir/ops/collectives.py` says which gradients collectives
have).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.meaning.check.ranks import PerRank, run_on_ranks


class _Joined(torch.autograd.Function):
    """A result that is equal on all ranks: one of them, whose gradient every rank gets."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        ctx.count = len(values)
        return values[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        grads: tuple[Tensor, ...] = (grad,) * ctx.count
        return grads


def simulated(graph: ProgramGraph) -> Callable[..., Sequence[Any]]:
    """The function that computes a graph's results for all ranks."""
    run = on_all_ranks(graph)
    return lambda *inputs: [one_of_all(value) for value in run(*inputs)]


def on_all_ranks(graph: ProgramGraph) -> Callable[..., Sequence[Any]]:
    """The function that computes a graph's results for all ranks: a `PerRank` where they may differ."""
    assert graph.ranks is not None
    ranks = graph.ranks
    placeholders = graph.placeholders()
    order = [n for n in graph.graph.nodes if n.op == "call_function"]
    results: Any = graph.graph.output_node().args[0]

    def run(*inputs: Any) -> Sequence[Any]:
        given = dict(zip(placeholders, map(_for_all, inputs), strict=True))
        return run_on_ranks(order, given, list(results), _compute, ranks)

    def _for_all(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.requires_grad and torch.is_grad_enabled()):
            return value
        return PerRank([value, *(value.detach().requires_grad_() for _ in range(ranks.count - 1))])

    return run


def _compute(node: fx.Node, args: Any, kwargs: Any) -> Any:
    target: Any = node.target
    return target(*args, **kwargs)


def one_of_all(value: Any) -> Any:
    """The value that all ranks have.

    Raises:
        RuntimeError: they differ: a bug in attngraph.
    """
    if not isinstance(value, PerRank):
        return value
    if not isinstance(value[0], Tensor):
        return value[0]
    for other in value[1:]:
        if not torch.equal(other.detach(), value[0].detach()) and not torch.allclose(
            other.detach(), value[0].detach(), equal_nan=True
        ):
            raise RuntimeError("ranks have different results. Please report it.")
    return _Joined.apply(*value) if value[0].is_floating_point() else value[0]
