"""Operations beside attention: dropout, memory, products with some of the experts, and what ties two results.

`dropout` keeps an element where `random(seed, its indices) >= p`, and scales it by `1 / (1 - p)`. A fused
attention drops its weights by the same numbers, so given its seed this says which weights it dropped.

`laid_out`: how a value lies in memory, as the model's own, on which others rely. `order` has the dimensions
from the slowest in memory to the fastest; empty: as it is. It has no element rule, so what follows from it
goes on following. `strided_scatter` gives x with `src` at the places of `x.as_strided(size, stride,
storage_offset)`, all of them different. The elements of x fill its memory. It computes what
`aten::as_strided_scatter` does, whose derivative for x has the gradient of what is overwritten and none of
the rest (torch 2.14); this has its own.

`expert_rows(x, weight, ends, first)`: `x` `[S, D]` has the tokens of expert 0 first, then those of expert 1,
and so on; `ends` `[E]`, where each expert's tokens end (as torch's `grouped_mm` takes it). `weight`
`[n, D, H]` is of the experts from `first` (`[1]`) on. The result is `[S, H]`: `x @ weight` of its expert for
a token of these n, zero for all others. So the sum over ranks that have different experts is the product with
all of them, and a rank computes only what its own experts are asked. So it is of gradients.

`tied(value, kept, number)` stands where an attention is fused whose weights are handed out. Its result does
not follow from them then, so a gradient with respect to these would be none. Where gradients are recorded,
who runs the call says what takes the value's place (`tying`): `number` is that of the result, and `kept` is
what its weights are computed from (`passes/look_later.py`). Anywhere else it is a copy of the value.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_contiguous_or_false

from attngraph.ir.kept import holding
from attngraph.ir.language import Environment, Tile, evaluate

from attngraph.ir.ops.declare import (  # isort: skip
    Size, Sizes, declare, differentiated, has_tangent, is_recorded, run_kernel,
)  # fmt: skip


@declare(schema="(Tensor(a) x, int[] order) -> Tensor(a)", plain=True)
def laid_out(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its dimensions in this order in memory, from slowest to fastest; unchanged if they are
    already, or if no order is given."""
    if not order:
        return tensor
    dense = tensor.permute(*order)
    if is_contiguous_or_false(dense):  # where sizes follow from data a trace cannot tell
        return tensor
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return dense.clone(memory_format=torch.contiguous_format).permute(inverse)


@declare(plain=True)
def strided_scatter(x: Tensor, src: Tensor, size: Sizes, stride: Sizes, storage_offset: Size) -> Tensor:
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    memory = x.permute(order)
    places = torch.full([1] * len(size), storage_offset, dtype=torch.int64, device=x.device)
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(extent, device=x.device) * step
        places = places + along.view([-1 if d == axis else 1 for d in range(len(size))])
    written = memory.reshape(-1).index_put((places.reshape(-1),), src.reshape(-1))
    return written.reshape(memory.shape).permute(inverse)


def dropout(value: Tensor, seed: Any, rate: float, kept: Tensor | None = None) -> Tensor:
    """The values that a dropout keeps, scaled; the others are 0. `kept`: which they are, if that is known."""
    kept = kept_elements(seed, value.shape, rate, value.device) if kept is None else kept
    return torch.where(kept, value * (1 / (1 - rate)), 0.0)


@declare()
def _dropout(value: Tensor, seed: Tensor, p: float) -> Tensor:
    return dropout(value, seed, p)


def kept_elements(
    seed: Any, shape: Sequence[int], rate: float, device: torch.device,
    box: Sequence[Sequence[int] | None] | None = None,
) -> Tensor:  # fmt: skip
    """Which elements of a tensor of this shape a dropout keeps. `box`: the indices of each dimension that are
    asked for; None: all."""
    env = Environment(Tile(), (), (), torch.float64, device)
    places: list[Any] = []
    for axis, (extent, wanted) in enumerate(zip(shape, box or [None] * len(shape), strict=True)):
        asked = torch.arange(extent) if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        places.append(asked.to(device).view([-1 if d == axis else 1 for d in range(len(shape))]))
    return evaluate.random([seed, *evaluate.counters(places, list(shape))], env) >= rate


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


Tie = Callable[[int, Tensor, Sequence[Tensor]], Tensor]
"""Gives what takes the place of the result of this number, of this value and with these tensors kept."""
_TIE: ContextVar[Tie | None] = ContextVar("_TIE", default=None)


def tying(tie: Tie) -> contextlib.AbstractContextManager[Tie]:
    """Let `tie` say what takes the place of a fused result, in this thread."""
    return holding(_TIE, tie)


def _autograd(keys: Any, value: Tensor, kept: list[Tensor], number: int) -> Tensor:
    tie = _TIE.get()
    if not is_recorded((value, kept)):
        found: Tensor = run_kernel(tied, keys, value, kept, number)
        return found
    if tie is None or has_tangent((value, kept)):
        return value.clone()
    return tie(number, value, kept)


@declare(fake=lambda a: a.value.clone(), derivatives=_autograd)
def tied(value: Tensor, kept: list[Tensor], number: int) -> Tensor:
    return value.clone()
