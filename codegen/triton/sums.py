"""`attngraph::running_sum` on a GPU: from a call with few new tokens a row to one launched kernel.

Longer runs of tokens are left to PyTorch, which computes them in chunks by matrix products.
"""

import itertools
import logging
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.triton import attempts
from attngraph.codegen.triton.decode import FEW
from attngraph.codegen.triton.device import is_captured, no_device
from attngraph.codegen.triton.emit import emit_sums
from attngraph.codegen.triton.plan import DEEPEST, DTYPES, STATES, SumsPlan
from attngraph.codegen.triton.store import launch_kernel, loading
from attngraph.ir.ops.cached_attention import numbers_of, told

_log = logging.getLogger("attngraph.codegen.triton")


def run_sums(
    q: Tensor | None, k: Tensor | None, v: Tensor, decay: Tensor | None, state: Tensor, starts: Tensor,
    inclusive: bool = True, left: Tensor | None = None, right: Tensor | None = None,
    less_one: bool = False, in_order: bool = False,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """`attngraph::running_sum` where no row has more than FEW new tokens, or in order, token after token."""
    given = {"q": q, "k": k, "v": v, "decay": decay, "left": left, "right": right}
    present = {name: tensor for name, tensor in given.items() if tensor is not None}
    if no_device(v) is not None or not _are_served(present, state):
        return None
    if longest(starts, v) > FEW and not in_order:
        return None
    plan = plan_of(present, state, inclusive, less_one)
    found, problem = attempts.once(plan, v.device, lambda p: launch_sums(p, present, state, starts))
    if problem:
        _log.warning(
            "running sums are computed by PyTorch's operations on %s, since their kernel does not run: "
            "%s", v.device, problem,
        )  # fmt: skip
    return found


def longest(starts: Tensor, v: Tensor) -> int:
    """The most new tokens of a row, or a bound where nobody may be asked: while a CUDA graph is captured."""
    if told(starts) is None and is_captured(v.device):
        return v.shape[0]
    return max((b - a for a, b in itertools.pairwise(numbers_of(starts))), default=0)


def _are_served(present: dict[str, Tensor], state: Tensor) -> bool:
    dtypes = {tensor.dtype for tensor in present.values()}
    if len(dtypes) > 1 or not dtypes <= DTYPES.keys() or state.dtype not in STATES:
        return False
    if not state.is_cuda and torch.bfloat16 in (*dtypes, state.dtype):
        return False  # which the interpreter rounds wrongly
    return state.is_contiguous() and state.shape[2] <= DEEPEST and state.numel() > 0


def plan_of(present: dict[str, Tensor], state: Tensor, inclusive: bool, less_one: bool = False) -> SumsPlan:
    """The kernel for operands by their names."""
    decay = present.get("decay")
    return SumsPlan(
        state.shape[2], "q" in present, "k" in present,
        "" if decay is None else "each" if decay.shape[2] == state.shape[2] else "one",
        present["left"].shape[2] if "left" in present else 0,
        inclusive, present["v"].dtype, state.dtype, less_one and decay is not None,
    )  # fmt: skip


def launch_sums(
    plan: SumsPlan, present: dict[str, Tensor], state: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """What the op returns, by the plan's kernel."""
    v = present["v"]
    rows, heads, _, width = state.shape
    out, after = torch.empty(v.shape, dtype=v.dtype, device=v.device), torch.empty_like(state)
    strides = [
        stride if size > 1 else 0
        for name in plan.operands
        for size, stride in zip(present[name].shape, present[name].stride(), strict=True)
    ]
    tensors: list[Any] = [present[name] for name in plan.operands]
    arguments = [*tensors, state, after, out, starts, heads, width, *strides]
    grid = rows * heads, -(-width // plan.columns)
    launch_kernel(load(plan), grid, arguments, {"num_warps": plan.warps}, v.device)
    return out, after


load = loading(emit_sums, getattr)
"""A plan's kernel."""
