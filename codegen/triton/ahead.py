"""Compile a plan ahead of time, for a GPU that need not be there, and read what the binary uses.

For tests and for people who tune: registers, spills and shared memory decide whether a choice of
blocks is any good, and all three stand in the binary. The compilation is the one that a call with
contiguous rows and strides divisible by 16 would cause.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attngraph.codegen.triton import decode, emit, emit_backward, emit_decode, launch, launch_backward
from attngraph.codegen.triton.call import launch_options
from attngraph.codegen.triton.emit_decode import DecodePlan
from attngraph.codegen.triton.plan import Plan
from attngraph.codegen.triton.read_gradients import BackwardPlan

_POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    "bool": "*u8", "int": "*i64", "half": "*fp16", "float": "*fp32", "double": "*fp64",
}  # fmt: skip


_OPERANDS = {"query", "key", "value", "out", "new_key", "new_value", "grad"} | {
    f"grad_{name}" for name in ("query", "key", "value")
}
_NUMBERS = {"lse", "delta", "unseen", "part_acc", "part_m", "part_l"}
_PLACES = {"table", "starts", "first", "held"}
_LISTS = {"tiles", "counts", "column_tiles", "column_counts"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU: Triton's backend, its architecture, and the bytes of shared memory of a program."""

    backend: str
    architecture: int | str
    shared: int
    warp: int = 32


TARGETS = {
    "sm_80": Target("cuda", 80, 166_912),
    "sm_90": Target("cuda", 90, 232_448),
    "sm_100": Target("cuda", 100, 232_448),
    "gfx942": Target("hip", "gfx942", 65_536, 64),
}


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one program of a compiled kernel uses: bytes of shared memory, registers of a thread, bytes
    (NVIDIA) or registers (AMD) of a thread spilled to memory."""

    shared: int
    registers: int
    spilled: int


def compile_ahead(plan: Plan, target: Target) -> Usage:
    """Compile the forward kernel of a plan (of a `DecodePlan` the one that splits keys) for the target.

    Raises:
        RuntimeError: Triton runs as an interpreter in this process, or its tools say nothing readable.
    """
    if isinstance(plan, DecodePlan):
        return _compile(decode.load(plan)[0], emit_decode.arguments(plan), plan, target)
    return _compile(launch.load(plan), emit.arguments(plan), plan, target)


def compile_backward_ahead(plan: BackwardPlan, target: Target) -> tuple[Usage, ...]:
    """Compile the backward kernels of a plan: of queries, of keys, of reads. Raises as `compile_ahead`."""
    module, names = launch_backward.load_backward(plan), emit_backward.arguments(plan)
    kernels = [value for name, value in vars(module).items() if name.startswith("gradient")]
    return tuple(_compile(kernel, names, plan, target) for kernel in kernels)


def _compile(kernel: Any, names: Sequence[str], plan: Plan, target: Target) -> Usage:
    compiler = importlib.import_module("triton.compiler")
    gpu = importlib.import_module("triton.backends.compiler").GPUTarget(
        target.backend, target.architecture, target.warp
    )
    if not hasattr(kernel, "cache_key"):
        raise RuntimeError("compile_ahead: TRITON_INTERPRET is set; there is nothing to compile.")
    signature = {name: _type(plan, name) for name in names}
    ones = {(place,): 1 for place, kind in enumerate(signature.values()) if kind == "constexpr"}
    aligned = [place for place, name in enumerate(signature) if _is_aligned(name, signature[name])]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = compiler.ASTSource(kernel, signature, ones, attributes)
    options = launch_options(plan)
    binary = importlib.import_module("triton").compile(source, target=gpu, options=options)
    if target.backend == "cuda":
        registers, spilled = _read_cubin(binary.asm["cubin"])
    else:
        registers, spilled = _read_assembly(binary.asm["amdgcn"])
    return Usage(int(binary.metadata.shared), registers, spilled)


def _type(plan: Plan, name: str) -> str:
    kinds = {f"r{read.number}": read.kind for read in plan.reads}
    if name in _OPERANDS:
        return _POINTERS[plan.dtype]
    if name in _NUMBERS or re.fullmatch(r"sums\d+", name):
        return "*fp32"
    if name in _LISTS:
        return "*i32"
    if name in _PLACES:
        return "*i64"
    if name in kinds:
        return _POINTERS[kinds[name]]
    return "constexpr" if name.endswith("_d") else "i32"


def _is_aligned(name: str, kind: str) -> bool:
    strides = re.fullmatch(r"(query|key|value|grad|new_key|new_value)_[bphs]", name)
    return kind.startswith("*") or strides is not None


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    nvidia = Path(importlib.import_module("triton.backends.nvidia").__path__[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(nvidia / "bin" / "cuobjdump"), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"compile_ahead: cuobjdump says nothing about registers:\n{text}")
    return int(found[1]), int(found[2])


def _read_assembly(text: str) -> tuple[int, int]:
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
    if registers is None or spilled is None:
        raise RuntimeError("compile_ahead: the assembly says nothing about registers.")
    return int(registers[1]), int(spilled[1])
