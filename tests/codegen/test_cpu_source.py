"""The C that is emitted for a score program reads as its golden file says, forward and backward. The headers
between which it stands are files of their own, so a golden file names them instead of repeating them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attngraph.codegen.cpu
from attngraph.codegen.cpu import compiled, source
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS

HEADERS = Path(attngraph.codegen.cpu.__file__).parent / "c"
PROGRAMS = {
    "slopes": ("s = 0.125 * dot + r0[h] * (k - q); keep k <= q", [torch.empty(2)]),
    "documents": (
        "s = 5 * tanh(dot / 40); keep r0[b, q] == r0[b, k]; keep k <= q + n0",
        [torch.empty(1, 8, dtype=torch.int64)],
    ),
}


def without_headers(source: str) -> str:
    for header in HEADERS.glob("*.h"):
        source = source.replace(header.read_text(encoding="utf-8"), f"/* ... {header.name} ... */\n")
    return source


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_emitted_c_reads_as_its_golden_file_says(name: str, golden: Callable[..., None]) -> None:
    text, reads = PROGRAMS[name]
    program, q = parse(text), torch.empty(1, 2, 8, 64)
    forward = KERNELS["cpu.compiled"].source(program, (q, q, q), reads)
    golden(f"{name}.c.txt", without_headers(forward))
    plan = compiled.plan_gradients(program, (q, q, q), reads)
    golden(f"{name}_backward.c.txt", without_headers(source.write(plan).text))
