"""Products of tokens, sorted by expert, with the weights of some of the experts.

`x`: `[S, D]`, the tokens of expert 0 first, then those of expert 1, and so on; `ends`: `[E]`, where each
expert's tokens end (as torch's `grouped_mm` takes it). `weight`: `[n, D, H]`, of the experts from `first`
(`[1]`) on. The result is `[S, H]`: `x @ weight` of its expert for a token of these n, zero for all others. So
the sum over ranks that have different experts is the product with all of them, and a rank computes only what
its own experts are asked. Gradients are those of the rows that are computed.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.ops.declare import declare, differentiated


def _rows(ends: Tensor, first: Tensor, count: int) -> Iterator[tuple[int, slice]]:
    """The rows of each expert that a rank has and that has any; its number counts from `first`."""
    start = int(first)
    own = ends[max(start - 1, 0) : start + count].tolist()
    bounds = own if start else [0, *own]
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end > begin:
            yield number, slice(begin, end)


class _ExpertRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends, first)
        return _expert_rows(x.detach(), weight.detach(), ends, first)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x, weight, ends, first = ctx.saved_tensors
        of_x = _expert_rows(grad, weight.mT, ends, first)
        of_weight = torch.zeros_like(weight)
        for number, rows in _rows(ends, first, weight.shape[0]):
            of_weight[number] = x[rows].mT @ grad[rows]
        return of_x, of_weight, None, None


@declare(
    fake=lambda a: a.x.new_empty(a.x.shape[0], a.weight.shape[2]), plain=True,
    derivatives=differentiated("expert_rows", _ExpertRows.apply),
)  # fmt: skip
def _expert_rows(x: Tensor, weight: Tensor, ends: Tensor, first: Tensor) -> Tensor:
    found = x.new_zeros(x.shape[0], weight.shape[2])
    for number, rows in _rows(ends, first, weight.shape[0]):
        torch.mm(x[rows], weight[number], out=found[rows])
    return found


EXPERT_ROWS = torch.ops.attngraph.expert_rows.default
