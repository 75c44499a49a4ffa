"""What every launched kernel is told: the tensors that its program reads, and how it is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.triton.plan import Plan


def read_arguments(plan: Plan, reads: Sequence[Tensor]) -> list[Any]:
    """What a kernel is told of the tensors that its program reads."""
    found: list[Any] = []
    for read in plan.reads:
        tensor = reads[read.number]
        # Triton has no pointers to single bits.
        found.append(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor)
        found += tensor.stride()
        found += [tensor.shape[axis] for axis in plan.guarded_axes(read.number)]
    return found


def launch_options(plan: Plan) -> dict[str, Any]:
    """Options of a compilation. Multiplications and additions may fuse, as they do in PyTorch's own
    kernels."""
    return {"num_warps": plan.blocks.warps, "num_stages": plan.blocks.stages, "enable_fp_fusion": True}


def is_wide(tensor: Tensor) -> bool:
    """Whether its elements lie so far apart that offsets need 64 bits."""
    return sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) >= 1 << 31
