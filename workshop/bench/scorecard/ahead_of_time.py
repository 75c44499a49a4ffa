"""Compile a plan ahead of time, for a GPU that need not be present, and read the binary's resource usage.

For tests and for tuning: registers, spills and shared memory decide whether a choice of block sizes is
useful, and the binary states all three. The compilation is that of a call with contiguous rows and strides
divisible by 16.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from attngraph.codegen.triton import decode, launch, sums
from attngraph.codegen.triton.plan import DTYPES as TRITON
from attngraph.codegen.triton.plan import BackwardPlan, DecodePlan, Plan, SumsPlan, in_two, padded
from attngraph.codegen.triton.store import launch_options
from attngraph.ir.dtypes import DTYPES

_OF_READS = {
    "bool": torch.bool, "int": torch.int64, "half": torch.float16, "float": torch.float32,
    "double": torch.float64,
}  # fmt: skip
_OPERANDS = {"query", "key", "value", "out", "new_key", "new_value", "grad"} | {
    f"grad_{name}" for name in ("query", "key", "value")
}
_NUMBERS = {"lse", "grad_lse", "delta", "tops", "totals", "unseen", "part_acc", "part_m", "part_l"} | {
    "key_scale", "value_scale"
}  # fmt: skip
_PLACES = {"table", "starts", "first", "held"}
_LISTS = {"tiles", "counts", "column_tiles", "column_counts", "turns", "ranks"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU: Triton's backend, its architecture, and the shared memory that a program may use, in bytes."""

    backend: str
    architecture: int | str
    shared: int
    warp: int = 32

    @property
    def capability(self) -> tuple[int, int] | None:
        """Its compute capability, if it is an NVIDIA GPU."""
        known = isinstance(self.architecture, int)
        return (int(self.architecture) // 10, int(self.architecture) % 10) if known else None


TARGETS = {
    "sm_80": Target("cuda", 80, 166_912),
    "sm_90": Target("cuda", 90, 232_448),
    "sm_100": Target("cuda", 100, 232_448),
    "gfx942": Target("hip", "gfx942", 65_536, 64),
}


def compile_ahead(plan: Plan, target: Target) -> Usage:
    """Compile the forward kernel of a plan (for a `DecodePlan`, the kernel that splits keys) for the target.

    Raises:
        RuntimeError: Triton runs as an interpreter in this process, or the output of its tools cannot be
        parsed. Errors of the compiler are passed on.
    """
    if isinstance(plan, DecodePlan):
        return _compile(decode.load(plan)[0], plan, target)
    return _compile(launch.load(plan), plan, target)


def compile_join_ahead(plan: DecodePlan, target: Target) -> Usage:
    """Compile the kernel that combines the parts of a row's keys. Raises as `compile_ahead`."""
    return _compile(decode.load(plan)[1], plan, target)


def compile_sums_ahead(plan: SumsPlan, target: Target) -> Usage:
    """Compile the kernel of sums that are carried. Raises as `compile_ahead`."""
    kernel, given = sums.load(plan), plan.operands
    types = {
        **dict.fromkeys(given, _pointer(plan.dtype)), "out": _pointer(plan.dtype), "starts": "*i64",
        **dict.fromkeys(("state", "after"), _pointer(plan.state)),
    }  # fmt: skip
    names = kernel.arg_names
    signature = tuple((n, types.get(n) or ("constexpr" if n.endswith("_d") else "i32")) for n in names)
    return compile_kernel(kernel, _request_for(kernel, signature, target, {"num_warps": plan.warps}))


def compile_backward_ahead(plan: BackwardPlan, target: Target) -> tuple[Usage, ...]:
    """Compile the backward kernels of a plan: those for queries, keys and reads. Raises as
    `compile_ahead`."""
    module = launch.load_backward(plan)
    kernels = [value for name, value in vars(module).items() if name.startswith("gradient")]
    return tuple(_compile(kernel, plan, target) for kernel in kernels)


def requests(plan: Plan, target: Target) -> tuple[tuple[Any, Request], ...]:
    """The kernels of a plan, and what is asked of Triton to compile them for the target: the forward kernel,
    the one over a cache that splits keys, or all backward kernels. Raises RuntimeError as `compile_ahead`."""
    if isinstance(plan, DecodePlan):
        return ((kernel := decode.load(plan)[0], _request(kernel, plan, target)),)
    if isinstance(plan, BackwardPlan) and plan.blocks.groups:
        return ((kernel := launch.load_backward_by_groups(plan), _request(kernel, plan, target)),)
    if isinstance(plan, BackwardPlan):
        module = launch.load_backward(plan)
        kernels = [value for name, value in vars(module).items() if name.startswith("gradient")]
        return tuple((kernel, _request(kernel, plan, target)) for kernel in kernels)
    kernel = launch.load(plan)
    return ((kernel, _request(kernel, plan, target)),)


def _compile(kernel: Any, plan: Plan, target: Target) -> Usage:
    return compile_kernel(kernel, _request(kernel, plan, target))


def _request(kernel: Any, plan: Plan, target: Target) -> Request:
    signature = tuple((name, _type(plan, name)) for name in kernel.arg_names)
    return _request_for(kernel, signature, target, launch_options(plan))


def _request_for(
    kernel: Any, signature: tuple[tuple[str, str], ...], target: Target, options: dict[str, Any]
) -> Request:
    if not hasattr(kernel, "cache_key"):
        raise RuntimeError("compile_ahead: TRITON_INTERPRET is set; there is nothing to compile.")
    return Request(
        kernel.fn.__code__.co_filename, kernel.__name__, signature,
        tuple(place for place, (name, kind) in enumerate(signature) if _is_aligned(name, kind)),
        target.backend, target.architecture, target.warp, tuple(options.items()),
    )  # fmt: skip


def _type(plan: Plan, name: str) -> str:
    kinds = {f"r{read.number}": read.kind for read in plan.reads}
    kept = plan.kept if isinstance(plan, DecodePlan) else None
    if kept is not None and name in ("key", "value"):
        return _pointer(kept)
    if plan.blocks.ahead and name in ("key", "value"):
        width = padded(plan.D if name == "key" else plan.Dv)
        return f"tensordesc<{DTYPES[plan.dtype].triton}[1, 1, {plan.blocks.k}, {width}]>"
    if plan.blocks.groups and (block := _block(plan, name)):
        return _described(block, torch.float32 if name == "grad_query" or len(block) == 1 else plan.dtype)
    if name in _OPERANDS:
        return _pointer(plan.dtype)
    if name in _NUMBERS or re.fullmatch(r"sums\d+", name):
        return "*fp32"
    if name in _LISTS:
        return "*i32"
    if name in _PLACES:
        return "*i64"
    if name in kinds:
        return _pointer(_OF_READS[kinds[name]])
    return "constexpr" if name.endswith("_d") else "i32"


def _block(plan: Plan, name: str) -> list[int]:
    """The block of a tensor that kernels with groups of warps copy at a time; none: they get an address."""
    own, other, (D, Dv) = plan.blocks.q // 2, plan.blocks.k, (in_two(plan.D), in_two(plan.Dv))
    if isinstance(plan, BackwardPlan):
        rows = {"query": other, "grad_query": other, "grad": other, "key": own, "value": own}
        widths = {"grad": plan.Dv, "value": plan.Dv}
        if name in ("delta", "tops", "totals", "lse"):
            return [other]
        return [1, 1, rows[name], widths.get(name, plan.D)] if name in rows else []
    rows, whole = {"query": own, "key": other, "value": other}, name.removesuffix("_rest")
    width = (Dv if whole == "value" else D)[name.endswith("_rest")]
    return [1, 1, rows[whole], width] if whole in rows else []


def _described(block: list[int], dtype: torch.dtype) -> str:
    gluon = importlib.import_module("triton.experimental.gluon.language")
    layout = gluon.NVMMASharedLayout.get_default_for(block, getattr(gluon, TRITON[dtype]))
    return f"tensordesc<{DTYPES[dtype].triton}[{','.join(map(str, block))}],{layout!r}>"


def _pointer(dtype: torch.dtype) -> str:
    return f"*{DTYPES[dtype].triton}"


def _is_aligned(name: str, kind: str) -> bool:
    strides = re.fullmatch(r"(query|key|value|grad|out|new_key|new_value)_[bphs]", name)
    return kind.startswith("*") or strides is not None


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compile: the kernel `name` in the module at `path`, for arguments of these types ("constexpr":
    the number 1), of which those numbered in `aligned` are multiples of 16, and those in `small` tensors of
    less than 2 GiB (which AMD's compiler makes use of); for which GPU, with which options."""

    path: str
    name: str
    signature: tuple[tuple[str, str], ...]
    aligned: tuple[int, ...]
    backend: str
    architecture: int | str
    warp: int
    options: tuple[tuple[str, Any], ...]
    small: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resources of one program of a compiled kernel: bytes of shared memory, registers per thread, bytes
    (NVIDIA) or registers (AMD) per thread spilled to memory."""

    shared: int
    registers: int
    spilled: int


def build(kernel: Any, request: Request) -> Any:
    """Triton's compiled kernel, with the text of each stage in `asm` and the binary.

    Args:
        kernel: the Triton function that the request names.

    Raises:
        Errors of the compiler are passed on.
    """
    groups = kernel.is_gluon() if hasattr(kernel, "is_gluon") else False
    source = importlib.import_module("triton.experimental.gluon._runtime" if groups else "triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    signature = dict(request.signature)
    ones = {(place,): 1 for place, kind in enumerate(signature.values()) if kind == "constexpr"}
    attributes = {(place,): [["tt.divisibility", 16]] for place in request.aligned}
    for place in request.small:
        attributes.setdefault((place,), []).append(["tt.pointer_range", 32])
    return importlib.import_module("triton").compile(
        getattr(source, "GluonASTSource" if groups else "ASTSource")(kernel, signature, ones, attributes),
        target=target(request.backend, request.architecture, request.warp), options=dict(request.options),
    )  # fmt: skip


def compile_kernel(kernel: Any, request: Request) -> Usage:
    """Compile in this process.

    Raises:
        RuntimeError: the output of Triton's tools cannot be parsed. Errors of the compiler are passed on.
    """
    return usage(build(kernel, request), request)


def usage(binary: Any, request: Request) -> Usage:
    """What a compiled kernel uses. Raises RuntimeError as `compile_kernel`."""
    if request.backend != "cuda":
        return Usage(int(binary.metadata.shared), *_read_assembly(binary.asm["amdgcn"]))
    return Usage(int(binary.metadata.shared), *_read_cubin(binary.asm["cubin"]))


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    nvidia = Path(importlib.import_module("triton.backends.nvidia").__path__[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(nvidia / "bin" / "cuobjdump"), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about registers:\n{text}")
    return int(found[1]), int(found[2])


def _read_assembly(text: str) -> tuple[int, int]:
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
    if registers is None or spilled is None:
        raise RuntimeError("the assembly says nothing about registers.")
    return int(registers[1]), int(spilled[1])
