"""The device that kernels run on: whether there is a GPU and a Triton for it, and the GPU's properties."""

import contextlib
import functools
import importlib
import importlib.util
import os

import torch
from torch import Tensor

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
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"needs compute capability 8.0, this GPU has {major}.{minor}" if major < 8 else None


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 65536
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or 65536)


@functools.cache
def name_of(device: torch.device) -> str:
    """PyTorch's name of the GPU; empty if there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(device).name)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_of_multiprocessor(device: torch.device) -> int:
    """Bytes of shared memory that the programs on one multiprocessor have together."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return shared_memory(device)
    properties = torch.cuda.get_device_properties(device)
    return max(int(getattr(properties, "shared_memory_per_multiprocessor", 0)), shared_memory(device))


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: what is launched now runs later, on these addresses, as often
    as the graph is replayed."""
    is_used = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and torch.cuda.is_current_stream_capturing()


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels are launched on this device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
