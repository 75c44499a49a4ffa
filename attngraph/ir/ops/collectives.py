"""Collectives as nodes of a graph that every rank of a group runs: what is sent, and what its gradient is.

    attngraph::all_reduce(x, group) -> Tensor           the sum of the ranks' x
    attngraph::sum_gradients(x, group) -> Tensor        x, which is the same on every rank
    attngraph::all_gather(x, dim, ranks, group) -> Tensor   the ranks' x side by side along `dim`

A graph for several ranks has two kinds of values: replicated ones, equal on all ranks, whose gradient is
equal as well, and a rank's own part. `all_reduce` and `all_gather` lead from parts to replicated values, so a
rank's gradient of its own part is the gradient of the whole (cut, for a gather). `sum_gradients` stands where
a replicated value enters what ranks compute differently: each rank has a part of its gradient, and the
backward pass adds them up (Shoeybi et al. 2019, Megatron-LM, section 3, operators g and f). The gradients of
torch.distributed's own functional collectives are those of losses that differ by rank and are added, so they
are not used; these ops call them without gradients.

`group` is a process group's name. Collectives along the token axis are in `token_collectives.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.ops.transforms import differentiate_by, has_tangent, is_recorded, run_kernel

torch.library.define("attngraph::all_reduce", "(Tensor x, str group) -> Tensor")
torch.library.define("attngraph::sum_gradients", "(Tensor x, str group) -> Tensor")
torch.library.define("attngraph::all_gather", "(Tensor x, int dim, int ranks, str group) -> Tensor")

_OPS = torch.ops.attngraph
ALL_REDUCE, SUM_GRADIENTS, ALL_GATHER = (
    _OPS.all_reduce.default, _OPS.sum_gradients.default, _OPS.all_gather.default,
)  # fmt: skip
Together = Callable[[Sequence[Any], Sequence[Tensor]], list[Tensor]]
COLLECTIVES: dict[Any, Together] = {}
"""Every collective, with what computes it for all ranks in one process: from the node's other arguments and
the ranks' operands to their results, with the gradients that the ranks would have."""


def _summed(x: Tensor, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    found: Tensor = functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
    return found


def _gathered(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    first = x.movedim(dim, 0).contiguous()
    found = functional.wait_tensor(functional.all_gather_into_tensor(first, ranks, group))
    return found.movedim(0, dim).contiguous()  # type: ignore[no-any-return]


@torch.library.impl("attngraph::all_reduce", "CompositeExplicitAutograd")
def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _summed(x, group)


@torch.library.impl("attngraph::sum_gradients", "CompositeExplicitAutograd")
def _sum_gradients(x: Tensor, group: str) -> Tensor:
    return x.clone()


@torch.library.impl("attngraph::all_gather", "CompositeExplicitAutograd")
def _all_gather(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return _gathered(x, dim, ranks, group)


@torch.library.register_fake("attngraph::all_reduce")  # type: ignore[untyped-decorator]
@torch.library.register_fake("attngraph::sum_gradients")  # type: ignore[untyped-decorator]
def _same_shape(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("attngraph::all_gather")  # type: ignore[untyped-decorator]
def _gathered_shape(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty([n * ranks if d == dim else n for d, n in enumerate(x.shape)])


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _summed(x.detach(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _summed(grad, ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        return _gathered(x.detach(), dim, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        group = torch._C._distributed_c10d._resolve_process_group(ctx.group)
        rank = torch.distributed.get_rank(group)
        return grad.narrow(ctx.dim, rank * ctx.size, ctx.size), None, None, None


def differentiated(op: Any, function: Any) -> Callable[..., Any]:
    """The rule for autograd of a collective: `function` is its autograd.Function."""

    def rule(keys: Any, *args: Any) -> Any:
        if has_tangent(args):
            raise NotImplementedError(f"{op} has no forward-mode derivative.")
        if is_recorded(args):
            return function.apply(*args)
        return args[0] if op is SUM_GRADIENTS else run_kernel(op, keys, *args)

    return rule


differentiate_by("all_reduce", differentiated(ALL_REDUCE, _AllReduce))
differentiate_by("sum_gradients", differentiated(SUM_GRADIENTS, _SumGradients))
differentiate_by("all_gather", differentiated(ALL_GATHER, _AllGather))


class _TogetherSum(torch.autograd.Function):
    """`all_reduce` of all ranks: every rank's result is the sum, and its gradient its own."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        total = functools.reduce(torch.add, (p.detach() for p in parts))
        return tuple(total.clone() for _ in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return grads


class _TogetherSumGradients(torch.autograd.Function):
    """`sum_gradients` of all ranks."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(v.clone() for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        total = functools.reduce(torch.add, grads)
        return tuple(total for _ in grads)


class _TogetherGather(torch.autograd.Function):
    """`all_gather` of all ranks."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.dim = dim
        whole = torch.cat([p.detach() for p in parts], dim)
        return tuple(whole.clone() for _ in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        size = grads[0].shape[ctx.dim] // len(grads)
        return (None, *(g.narrow(ctx.dim, rank * size, size) for rank, g in enumerate(grads)))


COLLECTIVES.update({
    ALL_REDUCE: lambda args, parts: list(_TogetherSum.apply(*parts)),
    SUM_GRADIENTS: lambda args, parts: list(_TogetherSumGradients.apply(*parts)),
    ALL_GATHER: lambda args, parts: list(_TogetherGather.apply(args[0], *parts)),
})  # fmt: skip


def bytes_sent(target: Any, size: int, ranks: int) -> int:
    """The bytes that each rank sends in a ring for one collective whose operand has `size` bytes."""
    if target is ALL_REDUCE:
        return 2 * size * (ranks - 1) // ranks
    return size * (ranks - 1) if target is ALL_GATHER else 0
