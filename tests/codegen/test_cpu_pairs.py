"""Attention of bfloat16 numbers by products of pairs: its error, and what compilers make of it."""

from __future__ import annotations

import itertools
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu import call, source, toolchain
from attngraph.codegen.cpu.source import Plan
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS
from attngraph.meaning.check.comparison import FLASH, compare

from .conftest import FLAGS

SHAPES = {
    "even": (2, 4, 2, 130, 130, 64, 64),
    "odd": (1, 2, 1, 70, 133, 33, 45),
    "one key": (1, 2, 2, 50, 1, 1, 1),
    "wide": (1, 2, 1, 49, 200, 128, 70),
}
PROGRAMS = (
    "s = {scale} * dot",
    "s = {scale} * dot; keep k <= q + 70; sink r0[h]",
    "s = {scale} * dot - min(k, 1)",  # one weight is 1, and all others are rounded to the same side
    "s = {scale} * dot; p = p * p",
)


def operands(shape: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    b, h, hkv, queries, keys, d, dv = SHAPES[shape]
    g = torch.Generator().manual_seed(seed)
    sizes = ((b, h, queries, d), (b, hkv, keys, d), (b, hkv, keys, dv))
    q, k, v = (torch.randn(size, generator=g).bfloat16() for size in sizes)
    return q, k, v


def run(kernel: str, text: str, given: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    q, k, v = (t.to(dtype) for t in given)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])[: q.shape[1]]
    return KERNELS[kernel].forward(parse(text), (q, k, v), [sinks], [])[0]


def eager(text: str, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The most exact way to multiply values of bfloat16: weights are rounded as late as possible."""
    q, k, v = given
    every = torch.eye(k.shape[2], dtype=torch.bfloat16).expand(*k.shape[:2], -1, -1)
    weights = run("reference", text, (q, k, every), torch.float32).bfloat16()
    return weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)


needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or platform.machine() not in ("x86_64", "AMD64"), reason="needs gcc on x86"
)


@pytest.fixture(params=["as they are here", pytest.param("without pairs", marks=needs_gcc)])
def instructions(
    request: pytest.FixtureRequest, compiled_at_any_size: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The processor's, or those without products of pairs."""
    if request.param == "without pairs":
        monkeypatch.setenv("CC", "gcc -mno-avx512bf16")
    monkeypatch.setattr(call, "_libraries", {})
    for cached in (toolchain.compiler, toolchain._identity):
        cached.cache_clear()
    yield
    for cached in (toolchain.compiler, toolchain._identity):
        cached.cache_clear()


@pytest.mark.usefixtures("instructions", "served")
@pytest.mark.parametrize("program", PROGRAMS)
def test_errors_are_at_most_twice_those_of_an_eager_model(program: str) -> None:
    for shape, seed in itertools.product(SHAPES, range(3)):
        given = operands(shape, seed)
        text = program.format(scale=given[0].shape[3] ** -0.5)
        exact = run("reference", text, given, torch.float64)
        mine = run("cpu.compiled", text, given, torch.bfloat16)
        found = compare(mine, exact, FLASH, eager=eager(text, given))
        assert found.holds, (shape, seed, found.error, found.eager_error, str(found))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_at_any_size", "served")
def test_weights_are_divided_by_the_sum_of_what_they_were_rounded_to() -> None:
    """All but the first key have one weight, 0.9048 before it is rounded, and values are near each other:
    dividing by the sum of unrounded weights would move every result by a thousandth."""
    q, k, v = operands("even", 0)
    v = (8 + v.float()).bfloat16()
    for text in ("s = where(k < 1, 0, -0.1) + 0 * dot", "s = where(k < 1, 0, -0.1) + 0 * dot; sink -50"):
        exact = run("reference", text, (q, k, v), torch.float64)
        error = (run("cpu.compiled", text, (q, k, v), torch.bfloat16).double() - exact).abs().max()
        nearest = (exact.bfloat16().double() - exact).abs().max()
        assert error <= 1.1 * nearest


# --- what compilers make of it ---


def loops(assembly: str) -> list[list[str]]:
    """The instructions of each innermost loop: from a label to a jump back to it, without other jumps."""
    found, labels, body = [], dict[str, int](), list[str]()
    for line in map(str.strip, assembly.splitlines()):
        if re.fullmatch(r"\.L\w+:", line):
            labels[line[:-1]] = len(body)
        elif re.match(r"j\w+\s", line):
            start = labels.get(line.split()[-1])
            found += [] if start is None else [body[start:]]
            labels, body = {}, []
        elif line and not line.startswith((".", "#")):
            body.append(line)
    return found


def loops_for(target: str, dtype: torch.dtype) -> list[list[str]]:
    """Those of causal attention, compiled as for users, but for another processor."""
    text = source.write(Plan(parse("keep k <= q"), dtype, ())).text
    flags = [flag for flag in FLAGS if flag not in ("-march=native", "-shared")]
    command = ["gcc", *flags, f"-march={target}", "-S", "-x", "c", "-", "-o", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=100, check=False)
    if "bad value" in done.stderr:
        pytest.skip(f"this gcc does not know {target}")
    assert done.returncode == 0, done.stderr
    return loops(done.stdout)


def count(body: list[str], name: str) -> int:
    return sum(line.split()[0].startswith(name) for line in body)


@needs_gcc
@pytest.mark.parametrize("target", ["cooperlake", "znver4", "sapphirerapids"])
def test_the_inner_loop_multiplies_pairs(target: str) -> None:
    """Of the largest tile, 6 rows by 4 vectors: nothing is stored, and nothing else is multiplied."""
    found = [body for body in loops_for(target, torch.bfloat16) if count(body, "vdpbf16ps") == 24]
    assert len(found) >= 2  # of dots, and of weights with values
    for body in found:
        assert not count(body, "vfmadd") and not count(body, "vmul")
        assert not any(re.search(r"%[xyz]mm\d+, .*\(", line) for line in body), "\n".join(body)
        assert len(body) <= 24 + 6 + 4 + 6  # products, numbers to all lanes, vectors, places and the end


@needs_gcc
@pytest.mark.parametrize(("target", "dtype"), [("cooperlake", torch.float16), ("x86-64-v4", torch.bfloat16)])
def test_other_numbers_and_processors_have_no_pairs(target: str, dtype: torch.dtype) -> None:
    found = loops_for(target, dtype)
    assert not any(count(body, "vdpbf16ps") for body in found)
    assert any(count(body, "vfmadd") == 24 for body in found)
