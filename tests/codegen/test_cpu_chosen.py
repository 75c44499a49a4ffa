"""Attention in 16 bits is computed by the kernel that takes less time here, as was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu import chosen
from attngraph.codegen.cpu.compiled import Compiled
from attngraph.codegen.cpu.flash import Flash
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.kernels import KERNELS

CAUSAL = "s = 0.25 * dot\nkeep k <= q"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where times are stored; nothing is known yet."""
    monkeypatch.setattr(chosen, "_path", lambda: tmp_path / "chosen.json")
    in_a_new_process(monkeypatch)
    yield tmp_path


def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_known", None)
    monkeypatch.setattr(chosen, "_measured_here", set())


def takes(monkeypatch: pytest.MonkeyPatch, flash: float, ours: float) -> list[str]:
    """Let the kernels take so long; returns the list of what is timed."""
    timed: list[str] = []

    def time_of(way: Any) -> tuple[float, Any]:
        is_flash = isinstance(way.func.__self__, Flash)
        timed.append("flash" if is_flash else "ours")
        return flash if is_flash else ours, way()

    monkeypatch.setattr(chosen, "_timed", time_of)
    return timed


def operands(dtype: torch.dtype = torch.bfloat16, tokens: int = 800) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, tokens, 16, generator=g).to(dtype) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fast", ["cpu.flash", "cpu.compiled"])
def test_the_faster_kernel_serves_all_calls_of_a_kind(
    fast: str, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = takes(monkeypatch, *((0.01, 0.03) if fast == "cpu.flash" else (0.03, 0.01)))
    program, (q, k, v) = parse(CAUSAL), operands(dtype)
    kernel = Compiled()
    flash = Flash().forward(program, (q, k, v), [], ())[0]
    ours = kernel._forward(program, (q, k, v), [], ())[0]
    assert not torch.equal(flash, ours)
    for call in range(3):
        out = kernel.forward(program, (q, k, v), [], ())[0]
        assert torch.equal(out, flash if fast == "cpu.flash" else ours)
        assert len(timed) == 2 * chosen.TURNS, call
    exact, _ = KERNELS["reference"].forward(program, (q.double(), k.double(), v.double()), [], ())
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    (kind,) = json.loads((folder / "chosen.json").read_text())
    assert "causal" in kind and "1024 queries" in kind
    assert any(f"takes 3.0 times as long as {fast}" in remark for remark in kernel.remarks(program))


def test_gradients_are_chosen_by_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = takes(monkeypatch, 0.01, 0.03)
    program, given, kernel = parse(CAUSAL), operands(), Compiled()
    results = kernel.forward(program, given, [], ())
    grads = torch.randn_like(results[0]), torch.zeros_like(results[1])
    found = kernel.backward(program, given, [], (), results, grads)
    assert len(timed) == 4 * chosen.TURNS
    wanted = Flash().backward(program, given, [], (), results, grads)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is not None and torch.equal(ours, theirs)  # type: ignore[arg-type]


def test_a_clear_difference_is_not_measured_by_other_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(monkeypatch, 0.01, 0.03)
    Compiled().forward(parse(CAUSAL), operands(), [], ())
    in_a_new_process(monkeypatch)
    monkeypatch.setattr(chosen, "measure", lambda *_: pytest.fail("measured again"))
    out = Compiled().forward(parse(CAUSAL), operands(), [], ())[0]
    assert torch.equal(out, Flash().forward(parse(CAUSAL), operands(), [], ())[0])


def test_the_least_times_of_several_processes_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first one other work made one kernel, the faster one, seem slower."""
    program, given = parse(CAUSAL), operands()
    flash, ours = (k(program, given, [], ())[0] for k in (Flash().forward, Compiled()._forward))
    seen = [(0.02, 0.03), (0.025, 0.019), (0.04, 0.03), (0.04, 0.04), (0.04, 0.04)]
    for process, times in enumerate(seen):
        in_a_new_process(monkeypatch)
        timed = takes(monkeypatch, *times)
        kernel = Compiled()
        for _ in range(2):
            out = kernel.forward(program, given, [], ())[0]
            assert torch.equal(out, ours if process else flash)
        assert len(timed) == 2 * (1 if process else chosen.TURNS)
    (about,) = json.loads((folder / "chosen.json").read_text()).values()
    assert about == {"seconds": {"cpu.flash": 0.02, "cpu.compiled": 0.019}, "processes": chosen.PROCESSES}
    in_a_new_process(monkeypatch)
    monkeypatch.setattr(chosen, "measure", lambda *_: pytest.fail("measured once more"))
    assert torch.equal(Compiled().forward(program, given, [], ())[0], ours)


def test_times_of_other_kernels_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = chosen._path()
    monkeypatch.setattr(chosen.native, "FOLDER", tmp_path)
    assert chosen._path() != before and chosen._path().parent == before.parent


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"a": 1}', '{"a": {"b": 1, "c": 2}}', '{"a": {"seconds": {"b": 1}, "processes": 1}}',
        '{"a": {"seconds": {"b": 1, "c": "x"}, "processes": 1}}', '{"a": {"seconds": {"b": 1, "c": 2}}}',
    ],
)  # fmt: skip
def test_a_malformed_file_is_ignored(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "chosen.json").write_text(text)
    timed = takes(monkeypatch, 0.01, 0.03)
    Compiled().forward(parse(CAUSAL), operands(), [], ())
    assert len(timed) == 2 * chosen.TURNS


@pytest.mark.parametrize(
    ("program", "dtype", "tokens"),
    [
        (CAUSAL, torch.float32, 800),  # whose numbers are no shorter than ours
        ("s = 0.25 * dot\nkeep k <= q and k > q - 5", torch.bfloat16, 800),  # which ATen's does not serve
        ("s = 0.25 * dot\nsink r0[h]", torch.bfloat16, 800),
        (CAUSAL, torch.bfloat16, 40),  # too small to be compiled
    ],
)
def test_nothing_is_measured_where_there_is_no_choice(
    program: str, dtype: torch.dtype, tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "measure", lambda *_: pytest.fail("measured"))
    Compiled().forward(parse(program), operands(dtype, tokens), [torch.zeros(2)], ())
