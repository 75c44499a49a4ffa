"""The device that kernels run on: whether there is a GPU and a Triton for it, and the GPU's properties."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.kept import holding

_NOTHING = contextlib.nullcontext()


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1, which runs every kernel as plain Python."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return False
    language = importlib.import_module("triton.language")
    return not isinstance(language.sum, importlib.import_module("triton.runtime.jit").JITFunction)


@functools.cache
def no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        importlib.import_module("triton.language")
    except Exception as problem:  # a broken installation fails in many ways
        return f"triton cannot be imported ({type(problem).__name__}: {problem})"
    return None


@functools.cache
def triton_version() -> tuple[int, int]:
    """The version that is installed; (0, 0) without one."""
    try:
        major, minor, *_ = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


def no_device(q: Tensor) -> str | None:
    """Why no kernel can run on the tensor's device, or None."""
    kind = q.device.type
    if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on a GPU, the tensors are on {kind} (TRITON_INTERPRET=1 runs it anywhere, slowly)"
    reason = no_triton()
    if reason is not None:
        return reason
    if kind != "cuda":
        return None if is_interpreted() else "TRITON_INTERPRET=1 was set after triton had been imported"
    return _too_old(q.device)


@functools.cache
def _too_old(device: torch.device) -> str | None:
    """Why kernels do not run on this GPU, or None."""
    found = capability(device)
    return None if found is None or found[0] >= 8 else (
        f"needs compute capability 8.0, this GPU has {found[0]}.{found[1]}"
    )  # fmt: skip


@functools.cache
def _about(device: torch.device) -> Any:
    """PyTorch's properties of the GPU; None if there is none."""
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device) if is_there else None


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    return int(getattr(_about(device), "shared_memory_per_block_optin", 0) or 65536)


def name_of(device: torch.device) -> str:
    """PyTorch's name of the GPU; empty if there is none."""
    return str(getattr(_about(device), "name", ""))


def multiprocessors(device: torch.device) -> int:
    return int(getattr(_about(device), "multi_processor_count", 1))


def shared_of_multiprocessor(device: torch.device) -> int:
    """Bytes of shared memory that the programs on one multiprocessor have together."""
    return max(int(getattr(_about(device), "shared_memory_per_multiprocessor", 0)), shared_memory(device))


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for other devices."""
    about = None if torch.version.hip is not None else _about(device)
    return None if about is None else (about.major, about.minor)


_rehearsed: ContextVar[bool] = ContextVar("_rehearsed", default=False)


def as_captured() -> contextlib.AbstractContextManager[bool]:
    """Kernels are launched in the body as while a CUDA graph is captured, where none can be compiled."""
    return holding(_rehearsed, True)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: what is launched now runs later, on these addresses, as often
    as the graph is replayed."""
    is_used = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and (_rehearsed.get() or torch.cuda.is_current_stream_capturing())


def is_exact(q: Tensor) -> bool:
    """Whether products have the precision of their operands: those of float32 do, as PyTorch's own, unless
    `torch.set_float32_matmul_precision` allows less."""
    return q.dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels are launched on this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
