"""Arguments that all kernels have: the tensors that the program reads, and compilation options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.triton.plan import Plan


def read_arguments(plan: Plan, reads: Sequence[Tensor]) -> list[Any]:
    """A kernel's arguments for the tensors that its program reads."""
    found: list[Any] = []
    for read in plan.reads:
        tensor = reads[read.number]
        # Triton has no pointers to single bits.
        found.append(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor)
        found += tensor.stride()
        found += [tensor.shape[axis] for axis in plan.guarded_axes(read.number)]
    return found


def launch_options(plan: Plan) -> dict[str, Any]:
    """Compilation options. Multiplications and additions may be fused (FMA), as in PyTorch's own kernels."""
    return {"num_warps": plan.blocks.warps, "num_stages": plan.blocks.stages, "enable_fp_fusion": True}


def is_wide(tensor: Tensor) -> bool:
    """Whether the tensor spans so much memory that offsets need 64 bits."""
    return sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) >= 1 << 31
