"""What all launches have in common: arguments for the tensors that a program reads, options, the launch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.triton.device import is_interpreted, on
from attngraph.codegen.triton.plan import Plan, padded


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


_ALIGNED = 16
"""Bytes of which addresses are multiples, or not. Of a described tensor, strides too."""


def is_describable(tensor: Tensor) -> bool:
    """Whether the machine's own copies of blocks (TMA) can read a tensor: its rows are dense, and begin at
    multiples of 16 bytes."""
    size, strides = tensor.element_size(), tensor.stride()
    return (
        strides[-1] == 1
        and not any(stride * size % _ALIGNED for stride in strides[:-1])
        and tensor.data_ptr() % _ALIGNED == 0
    )


def described(tensor: Tensor, rows: int) -> Any:
    """A tensor `[B, H, S, D]` as an argument of kernels that copy so many of its rows at a time."""
    block = [1, 1, rows, padded(tensor.shape[-1])]
    return _descriptor()(tensor, list(tensor.shape), list(tensor.stride()), block)


@functools.cache
def _descriptor() -> Any:
    return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor


MOST = 4096
"""Compiled kernels that are kept, by the arguments that they serve."""
_compiled: dict[Hashable, Any] = {}


def launch_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Launch a kernel on a device.

    Triton finds the compiled kernel of a call from each argument: its type, whether it is one, whether it is
    a multiple of 16. That takes longer than the launch, so the compiled kernel is kept for arguments of which
    all that is the same.

    Args:
        kernel: a Triton function that lives as long as the process (`launch.load`). options: always the same
            names for one kernel.
    """
    with on(device):
        if device.type != "cuda" or torch.version.hip is not None or is_interpreted():
            kernel[grid](*arguments, **options)  # on AMD's GPUs it also matters how large tensors are
            return
        key = id(kernel), device.index, *options.values(), *map(_specialised, arguments)
        found = _compiled.get(key)
        if found is not None:
            found[(*grid, 1, 1)[:3]](*arguments)
            return
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[key] = kernel[grid](*arguments, **options)


def _specialised(argument: Any) -> Hashable:
    """What of an argument compiled code follows from. Descriptors are aligned, and of the kernel's tiles."""
    if isinstance(argument, int):
        return argument
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNED
    return type(argument).__name__
