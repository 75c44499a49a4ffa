"""Emitted kernels: files that hold their source, and their launch.

One file per source lies in the user's cache and is imported from there: Triton reads a kernel's source from
its file, and so can people, debuggers and tracebacks. The directory is private (mode 0700, owner checked); if
that is not possible, a temporary one is used for this process. A file's name contains the kernel's name and
identifies the source and Triton's version. It is written atomically, and written again if its contents differ
from the source.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import stat
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from attngraph.codegen.triton.device import is_interpreted, on
from attngraph.codegen.triton.emit import Kernel
from attngraph.codegen.triton.plan import DTYPES, Plan, in_two, padded
from attngraph.ir import cache_folder
from attngraph.ir.ops.kernels import Reads
from attngraph.ir.records import write_whole

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def loading(emit: Callable[[K], Kernel], take: Callable[[ModuleType, str], R]) -> Callable[[K], R]:
    """A function from plans to what is taken from the module of their kernels, by the name of the first. It
    is never dropped: Triton unloads a kernel that nobody holds, and a captured CUDA graph holds its address
    alone."""

    @functools.cache
    def load(plan: K) -> R:
        kernel = emit(plan)
        return take(import_source(kernel.source, kernel.name), kernel.name)

    return load


def import_source(source: str, name: str, version: str = "") -> ModuleType:
    """The module with this source, imported from a file. `name`: its kernel's, made by `emit.name_of`.
    `version`: of Triton."""
    version = version or importlib.import_module("triton").__version__
    key = hashlib.sha256(f"{version}\n{source}".encode()).hexdigest()[:16]
    path = directory() / f"{name}_{key}.py"
    is_kept = path.is_file() and not path.is_symlink() and path.read_bytes() == source.encode()
    if not is_kept:
        write_whole(path, source)
    spec = importlib.util.spec_from_file_location(f"attngraph_emitted_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def directory() -> Path:
    """`triton` in the folder that attngraph keeps what it made in, if it can be private."""
    with contextlib.suppress(OSError, RuntimeError):
        found = cache_folder.wanted() / "triton"
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        if cache_folder.why_not_safe(found.parent) is None and _is_ours(found):
            found.chmod(0o700)
            return found
    return Path(tempfile.mkdtemp(prefix="attngraph-"))


def _is_ours(path: Path) -> bool:
    """Whether this is a folder (no link) that belongs to the user."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "getuid") or status.st_uid == os.getuid())


def read_arguments(plan: Plan, reads: Reads) -> list[Any]:
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
    options = {"num_warps": plan.blocks.warps, "num_stages": plan.blocks.stages, "enable_fp_fusion": True}
    # Of 12 warps, which share out as many registers among them as groups ask for.
    return {**options, "maxnreg": 168} if plan.blocks.groups else options


def is_wide(tensor: Tensor) -> bool:
    """Whether the tensor spans so much memory that offsets need 64 bits."""
    return sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) >= 1 << 31


_ALIGNED = 16
"""Bytes of which addresses are multiples, or not. Of a described tensor, strides too."""


def is_describable(tensor: Tensor) -> bool:
    """Whether the machine's own copies of blocks (TMA) can read a tensor: its rows are dense, and begin at
    multiples of 16 bytes."""
    *outer, inner = tensor.stride()
    places = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in outer))
    return inner == 1 and not any(place % _ALIGNED for place in places)


def described(tensor: Tensor, rows: int) -> Any:
    """A tensor `[B, H, S, D]` as an argument of kernels that copy so many of its rows at a time."""
    descriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    block = [1, 1, rows, padded(tensor.shape[-1])]
    return descriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def described_for_groups(plan: Plan, operands: Sequence[Tensor]) -> list[Any]:
    """Queries, keys and values as arguments of kernels with groups of warps, and then the rest of their rows
    where rows lie in two tiles."""
    tiles = list(zip(operands, (plan.blocks.q // 2, plan.blocks.k, plan.blocks.k), strict=True))
    widths = [in_two(tensor.shape[3]) for tensor in operands]
    return [
        described_to_gluon(tensor, [1, 1, rows, width[part]])
        for part in (0, 1) for (tensor, rows), width in zip(tiles, widths, strict=True) if width[part]
    ]  # fmt: skip


def described_to_gluon(tensor: Tensor, block: list[int]) -> Any:
    """A tensor as an argument of kernels in Gluon that copy such a block at a time."""
    described = importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
    gluon = importlib.import_module("triton.experimental.gluon.language")
    layout = gluon.NVMMASharedLayout.get_default_for(block, getattr(gluon, DTYPES[tensor.dtype]))
    return described.from_tensor(tensor, block, layout)


MOST = 4096
"""Compiled kernels that are kept, by the arguments that they serve."""
_compiled: dict[Hashable, Any] = {}


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any],
    device: torch.device,
) -> None:  # fmt: skip
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
