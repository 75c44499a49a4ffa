"""Compile one emitted kernel for one GPU, which need not be present, and read its resource usage."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


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
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    signature = dict(request.signature)
    ones = {(place,): 1 for place, kind in enumerate(signature.values()) if kind == "constexpr"}
    attributes = {(place,): [["tt.divisibility", 16]] for place in request.aligned}
    for place in request.small:
        attributes.setdefault((place,), []).append(["tt.pointer_range", 32])
    return importlib.import_module("triton").compile(
        compiler.ASTSource(kernel, signature, ones, attributes),
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
