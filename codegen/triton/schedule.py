"""Which of two schedules a forward kernel gets, and why not the other.

Classic: all warps of a program load tiles and compute with them, in two loops (`emit.py`). Warp-specialised
(sm_90, sm_100): some warps fetch tiles by tensor descriptors (TMA) while others compute, in one loop without
branches (`emit_specialised.py`). The compiler can divide only certain loops among warps, so only programs of
a certain form are warp-specialised. Neither has been measured: a kernel is classic unless a table
(`tuned.py`) or the caller says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from attngraph.codegen.triton import device
from attngraph.codegen.triton.plan import DTYPES, Blocks, Plan, padded
from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S

CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities for which warp-specialised kernels are made."""
UNTUNED: tuple[tuple[int, int], ...] = ()
"""Those on which a call that is in no table is warp-specialised too, where possible: none until it has been
measured."""
_WIDEST = 256
"""The most elements of a tile's row that one descriptor loads."""
ALIGNED = 16
"""Addresses and strides of descriptors must be multiples of this, in bytes."""
_Q = S.index("q")
_K = S.index("k")


def obstacle(plan: Plan) -> str | None:
    """Why a plan's program cannot be warp-specialised, whatever its blocks, or None."""
    if plan.dtype not in (torch.float16, torch.bfloat16):
        return f"{DTYPES[plan.dtype]} operands are not fetched for tensor cores"
    if max(padded(plan.D), padded(plan.Dv)) > _WIDEST:
        return f"heads are wider than {_WIDEST}"
    if plan.wide:
        return "descriptors count in 32 bits"
    for node in (n for e in plan.program.expressions for n in E.walk(e) if n.op == "read"):
        if _K in node.free or _has_score(node):
            return f"`{E.format_expr(node)}` is read in the loop over keys"
        if _Q in node.free:
            return f"`{E.format_expr(node)}` is read for every query"
    return None


def obstacle_of_blocks(blocks: Blocks) -> str | None:
    """Why warp specialisation does not work with tiles of these sizes, or None."""
    if blocks.warps != 4 or blocks.q not in (64, 128):
        return f"it takes 4 warps and 64 or 128 queries, not {blocks.warps} and {blocks.q}"
    return None


def obstacle_of_call(operands: Sequence[Tensor]) -> str | None:
    """Why descriptors cannot load from these tensors, or why their device has none; or None."""
    if torch.version.hip is not None:
        return "AMD's GPUs have no such descriptors"
    capability = device.capability(operands[0].device)
    if capability is not None and capability not in CAPABILITIES:
        return f"it is not made for compute capability {capability[0]}.{capability[1]}"
    for name, tensor in zip(("query", "key", "value"), operands, strict=True):
        *outer, inner = tensor.stride()
        if inner != 1 or outer[-1] <= 0:
            return f"the rows of {name} have strides {tuple(tensor.stride())}"
        if any(stride * tensor.element_size() % ALIGNED for stride in outer) or address(tensor) % ALIGNED:
            return f"the rows of {name} do not begin at multiples of {ALIGNED} bytes"
    return None


def specialised_blocks(plan: Plan, capability: tuple[int, int] | None) -> Blocks:
    """Block sizes to begin with on a GPU of that capability (None: unknown, taken as 9.0). Up to a width of
    128 they do not spill registers (checked with `ahead_of_time.py`); on sm_100, 128 queries of that width,
    or of a smaller one with softcapped scores, would."""
    if capability is not None and capability[0] == 10:
        return Blocks(64, 64, 4, 2, specialised=True)
    width = max(padded(plan.D), padded(plan.Dv))
    return Blocks(128, 128 if width <= 64 else 64, 4, 2, specialised=True)


def without_measurement(plan: Plan, operands: Sequence[Tensor]) -> Plan:
    """The plan of a call that is in no table."""
    capability = device.capability(operands[0].device)
    if capability not in UNTUNED or obstacle(plan) is not None:
        return plan
    blocks = specialised_blocks(plan, capability)
    return dataclasses.replace(plan, blocks=blocks) if operands[0].shape[2] >= blocks.q else plan


def _has_score(node: E.Expr) -> bool:
    return any(n in (S.DOT, S.SCORE, S.WEIGHT) for n in E.walk(node))


def address(tensor: Tensor) -> int:
    """The address of its first element; for a fake tensor, what is known of it."""
    if isinstance(tensor, FakeTensor):
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()
