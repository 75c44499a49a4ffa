"""NVIDIA's machine code: read by nvdisasm, counted instruction by instruction; and what ptxas remarks.

The disassembler and the assembler are those that Triton's package contains, or those that Triton is told to
use (TRITON_NVDISASM_PATH, TRITON_PTXAS_PATH).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attngraph.errors import AttnGraphError
from workshop.bench.scorecard.code import COUNTS, Code, Instruction, Step, Work, parse

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "1684": (16, 8, 4), "16832": (16, 8, 32)}
_FLOATS = ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2")
_NO_UNIT = (
    "WARPGROUP",
    "DEPBAR",
    "LDGDEPBAR",
    "BAR",
    "BRA",
    "NOP",
    "R2UR",
    "WARPSYNC",
    "BSSY",
    "BSYNC",
    "FENCE",
)
"""Instructions that are issued but keep no arithmetic unit busy; so are those of the uniform unit (U...)."""
LANES = 32


class ToolError(AttnGraphError):
    """A tool that reads machine code is missing."""


def tool(name: str) -> str:
    """The path of nvdisasm or ptxas.

    Raises:
        ToolError: there is none; says what to install.
    """
    given = os.environ.get(f"TRITON_{name.upper()}_PATH")
    backend = Path(importlib.import_module("triton.backends.nvidia").__path__[0])
    found = given or str(backend / "bin" / name)
    path = shutil.which(found) or shutil.which(name)
    if path is None:
        raise ToolError(
            f"machine code is read with {name}, which is neither in Triton's package ({found}) nor on "
            "PATH. Triton's wheels for Linux contain it; else install NVIDIA's CUDA toolkit (of nvdisasm "
            f"alone there is a package: nvidia-cuda-nvdisasm) and set TRITON_{name.upper()}_PATH to the file."
        )
    return path


def disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise ToolError(f"nvdisasm cannot read this kernel: {done.stderr.strip()}")
    return done.stdout


def remarks(ptx: str, architecture: str) -> str:
    """What ptxas says when it assembles this."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [tool("ptxas"), "-v", f"--gpu-name={architecture}", str(path), "-o", str(path) + ".o"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def serialised(said: str) -> int:
    """How often ptxas says that it makes products on tensor cores wait for each other (C7510 to C7519)."""
    return len(re.findall(r"\(C751\d\)", said))


def read(text: str) -> Code:
    """The code of the first kernel in nvdisasm's output."""
    return parse(text, _LABEL, _instruction)


def _instruction(line: str) -> Instruction | None:
    if (found := _LINE.search(line)) is None:
        return None
    guard, name, operands = found.groups()
    target = _TARGET.search(operands)
    base = name.split(".")[0]
    is_always = guard is None and not re.match(r"!?U?P\d", operands)
    if base != "BRA":
        return Instruction(name, operands, "", base in ("EXIT", "RET", "BRX") and is_always)
    return Instruction(name, operands, target[1] if target else "", is_always)


def multiplies(instruction: Instruction) -> bool:
    return instruction.name.split(".")[0] in ("HGMMA", "QGMMA", "HMMA", "QMMA")


def count(loop: Sequence[Instruction]) -> Work:
    """What a warp does in one turn of a loop."""
    waited = [re.match(r"SB0, 0x([0-9a-f]+)", i.operands) for i in loop if i.name.startswith("DEPBAR")]
    pending = [int(one[1], 16) for one in waited if one]
    by_groups = any(_by_group(i) for i in loop)
    return Work(
        len(loop), pending=min(pending, default=None), by_groups=by_groups, beside=_beside(loop),
        barriers=_barriers(loop), steps=_steps(loop) if by_groups else (), **_sums(loop),
    )  # fmt: skip


def _beside(loop: Sequence[Instruction]) -> int:
    """How many exponentials lie between products by warp groups and the wait for them."""
    found, asked = 0, False
    for one in loop:
        asked = (asked or _by_group(one)) and one.name != "WARPGROUP.DEPBAR.LE"
        found += asked and one.name.startswith("MUFU.EX2")
    return found


def _barriers(loop: Sequence[Instruction]) -> int:
    """Barriers of all warps, arrivals at those in shared memory, and waits for these (each of which the code
    has twice: a first look, and a loop)."""
    arrivals = sum(one.name.startswith(("BAR.", "SYNCS.ARRIVE")) for one in loop)
    return arrivals + len({one.operands for one in loop if one.name.startswith("SYNCS.PHASECHK")})


def registers(code: Code) -> tuple[int, int]:
    """The fewest and most registers that warps are given while the kernel runs, where they are shared out
    anew; else zeros."""
    numbers = [
        int(one.operands.split("0x")[1], 16)
        for one in code.instructions
        if one.name.startswith("USETMAXREG.DEALLOC")
    ]
    return (min(numbers), max(numbers)) if numbers else (0, 0)


def _by_group(instruction: Instruction) -> bool:
    return instruction.name.startswith(("HGMMA", "QGMMA"))


def _steps(loop: Sequence[Instruction]) -> tuple[Step, ...]:
    found: list[Step] = []
    since = 0
    for place, one in enumerate(loop):
        waits = re.match(r"gsb0, 0x([0-9a-f]+)", one.operands) if one.name == "WARPGROUP.DEPBAR.LE" else None
        if not (_by_group(one) or waits or place == len(loop) - 1):
            continue
        sums = _sums(loop[since : place + 1])
        kept = {f.name: sums[f.name] for f in dataclasses.fields(Step) if f.name in sums}
        closes = _by_group(one) and "gsb0" in one.operands
        found.append(
            Step(place + 1 - since, **kept, closes=closes, waits=int(waits[1], 16) if waits else None)
        )
        since = place + 1
    return tuple(found)


def _sums(loop: Sequence[Instruction]) -> dict[str, int]:
    found = dict.fromkeys(COUNTS, 0)
    for instruction in loop:
        name, base = instruction.name, instruction.name.split(".")[0]
        if multiplies(instruction):
            flops, bytes_read = _product(instruction)
            found["products"] += 1
            found["flops"] += flops
            found["operand_bytes"] += bytes_read
        elif base == "MUFU":
            found["special"] += 1
            found["exponentials"] += name.startswith("MUFU.EX2")
        elif base in ("I2F", "F2I", "F2F", "FRND"):
            found["special"] += 1
        elif base in _FLOATS:
            found["fused"] += 1
        elif base == "LDSM":  # factors of products
            found["operand_bytes"] += LANES * _width(name)
        elif base in ("LDS", "STS", "STSM", "ATOMS", "LDL", "STL"):
            found["shared_bytes"] += LANES * _width(name)
        elif base == "SHFL":
            found["shared_bytes"] += LANES * 4
        elif base in ("LDG", "LDGSTS", "LD"):
            found["loaded_bytes"] += LANES * _width(name)
        elif not (
            base.startswith("U") or base in _NO_UNIT or base in ("STG", "SYNCS", "RED", "ATOMG", "MEMBAR")
        ):
            found["integer"] += 1
        found["groups"] += base in ("LDGDEPBAR", "UTMALDG")
        found["stops"] += name.startswith(("WARPGROUP.DEPBAR", "BAR."))
    return found


def _product(instruction: Instruction) -> tuple[int, int]:
    """Operations of one warp's part of a product, and bytes of shared memory that it reads. A warp group
    (four warps) executes HGMMA together; its right factor, and its left one if two descriptors are one
    operand, lie in shared memory."""
    shape = re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.name)
    if shape is None:
        digits = instruction.name.split(".")[1]
        m, n, k = _SHAPES.get(digits, (16, 8, 16))
        return 2 * m * n * k, 0
    m, n, k = (int(extent) for extent in shape.groups())
    left = instruction.operands.split(",")[1].strip()
    rows = n if left.startswith("R") else n + m
    return 2 * m * n * k // 4, rows * k * 2 // 4


def _width(name: str) -> int:
    """Bytes that a load or store moves for each lane."""
    matrices = re.search(r"\.MT?88(?:\.(\d))?", name)
    if matrices is not None:
        return 4 * int(matrices[1] or 1)
    for part, size in ((".128", 16), (".64", 8), (".U16", 2), (".S16", 2), (".U8", 1), (".S8", 1)):
        if part in name:
            return size
    return 4
