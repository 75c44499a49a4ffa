"""The benchmark beside other engines: candidates that are installed answer as eager, lost cells are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph.codegen.cpu.toolchain import CompilerError, compiler
from workshop.__main__ import main
from workshop.bench import peers
from workshop.bench.peers import suite, table
from workshop.bench.peers.bandwidth import Memory
from workshop.bench.peers.cells import Cell, cells_of
from workshop.bench.peers.models import MODELS, bytes_of_weights, make
from workshop.bench.peers.worker import CANDIDATES, Failure, Worker, missing


@pytest.fixture
def memory() -> Memory:
    try:
        compiler()
    except CompilerError as problem:
        pytest.skip(str(problem))
    return Memory(1 << 20)


CELL = Cell("tiny Llama", 2, 1, 5)


def whole_model(cell: Cell) -> torch.Tensor:
    """The logits of the token after those that are kept."""
    model = make(cell.model)
    with torch.no_grad():
        found: torch.Tensor = model(cell.ids(64)[:, : (cell.kept or 0) + 1]).logits
    return found[:, -1:]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in CANDIDATES])
def test_a_candidate_answers_and_can_be_rewound(name: str) -> None:
    pytest.importorskip("transformers", reason="the transformers package is not installed")
    if reason := missing(name):
        pytest.skip(reason)
    worker = Worker(name, CELL.model, 240)
    try:
        made = worker.ask("make")
        if name == "zentorch" and isinstance(made, Failure):
            pytest.skip(made)
        assert not isinstance(made, Failure), made
        for _ in range(2):
            answer = worker.ask("answer", CELL)
            assert not isinstance(answer, Failure), answer
            torch.testing.assert_close(answer[0], whole_model(CELL), rtol=1e-4, atol=1e-5)
            for _ in range(2):
                times = worker.ask("time", CELL)
                assert not isinstance(times, Failure), times
                assert len(times) == CELL.calls[1]
        prompt, _ = worker.ask("answer", Cell(CELL.model, 2, 12))
        wanted = make(CELL.model)(Cell(CELL.model, 2, 12).ids(64)).logits[:, -8:]
        torch.testing.assert_close(prompt, wanted, rtol=1e-4, atol=1e-5)
    finally:
        worker.end()


@pytest.mark.slow
def test_a_run_compares_answers_then_times_in_turn(memory: Memory) -> None:
    pytest.importorskip("transformers", reason="the transformers package is not installed")
    found = suite.measured("tiny Llama", [CELL], ["eager", "attngraph"], 2, memory)
    cell = found["cells"][str(CELL)]
    assert cell["problems"] == {} and found["left out"] == {}
    assert set(cell["seconds"]) == {"eager", "attngraph"}
    assert len(cell["seconds"]["eager"]) == 2 * CELL.calls[1] and len(cell["bandwidth"]) == 2
    assert cell["differences"]["attngraph"] < 1e-4


class _Told:
    """A candidate that says what a test wants it to say."""

    def __init__(self, logits: torch.Tensor | str) -> None:
        self.logits = logits

    def ask(self, what: str, *_: Any) -> Any:
        if isinstance(self.logits, str):
            return Failure(self.logits)
        return (self.logits, 1.0) if what == "answer" else [0.5]


def test_a_candidate_with_another_answer_is_not_timed(memory: Memory) -> None:
    right = torch.ones(1, 1, 4)
    workers: Any = {
        "eager": _Told(right), "near": _Told(right + 1e-4), "far": _Told(right + 1e-2),
        "nan": _Told(right * torch.nan), "broken": _Told("no answer"),
    }  # fmt: skip
    found = suite._cell(CELL, workers, 1, memory)
    assert set(found["seconds"]) == {"eager", "near"}
    assert found["problems"]["broken"] == "no answer" and "differ" in found["problems"]["far"]
    assert "differ" in found["problems"]["nan"]


def test_a_candidate_that_is_not_installed_is_left_out_with_its_reason(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CANDIDATES, "engine", ("engines", "Engine", ("no_such_engine",)))  # type: ignore[index]
    found = suite.measured("tiny Llama", [], ["engine"], 1, memory)
    assert found["left out"] == {"engine": "no_such_engine is not installed"} and found["made"] == {}


def results(ours: float, other: float) -> dict[str, Any]:
    cell = {
        "kept": 128, "seconds": {"eager": [0.03] * 3, "OpenVINO": [other] * 3, "attngraph": [ours] * 3},
        "first": {}, "problems": {}, "bandwidth": [20e9],
    }  # fmt: skip
    model = {
        "bytes": 400_000_000, "made": {"eager": 0.0, "OpenVINO": 9.0, "attngraph": 0.1},
        "left out": {"zentorch": "this processor has no AVX-512"}, "cells": {"GPT-2, token": cell},
    }  # fmt: skip
    about = {"date": "2026-11-22", "processor": "P", "features": ["avx2"], "threads": 2}
    return {"machine": about, "packages": {"torch": "2"}, "models": {"GPT-2": model}}


@pytest.mark.parametrize("ours, is_lost", [(0.025, True), (0.0205, False), (0.018, False)])
def test_a_lost_cell_is_told_in_words(ours: float, is_lost: bool) -> None:
    text = table.text(results(ours, 0.020))
    assert ("LOST: GPT-2, token: attngraph takes 25.0 ms, OpenVINO 20.0 ms (1.25" in text) == is_lost
    assert ("attngraph lost no cell." in text) == (not is_lost)
    assert "zentorch is left out: this processor has no AVX-512." in text


def test_the_floor_is_bytes_over_bandwidth() -> None:
    assert "| 20.0 |" in table.text(results(0.03, 0.03))
    assert peers.bars(results(0.04, 0.02)).cells["GPT-2, token"]["floor"] == pytest.approx(0.5)


def test_the_weights_that_a_token_reads_do_not_count_tables() -> None:
    pytest.importorskip("transformers", reason="the transformers package is not installed")
    model = MODELS["tiny Llama"]()
    assert bytes_of_weights(model) == sum(p.nbytes for p in model.parameters())  # its table is its head
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    assert bytes_of_weights(model) == sum(p.nbytes for p in model.parameters()) - 64 * 32 * 4


def test_all_of_the_memory_is_read(memory: Memory) -> None:
    memory._block.fill_(1.0)
    assert (
        memory._code.read_all(
            __import__("ctypes").c_void_p(memory._block.data_ptr()), memory._block.numel(), 1
        )
        == memory._block.numel()
    )
    assert memory.bandwidth() > 0


def test_the_cells_are_those_of_the_page() -> None:
    assert [str(c) for c in cells_of("GPT-2", False)][:3] == [
        "GPT-2, prompt of 128", "GPT-2, prompt of 1024", "GPT-2, token, 128 kept, batch 1",
    ]  # fmt: skip
    assert len(cells_of("GPT-2", False)) == 6


def test_the_command_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(argv: list[str]) -> int:
        assert argv[2:] == ["--small"]
        Path(argv[1]).write_text(json.dumps(results(0.02, 0.02)))
        return 0

    monkeypatch.setattr(peers, "main", measured)
    assert main(["bench", "--suite", "peers", "--small", "--json", str(tmp_path / "p.json")]) == 0
    assert (tmp_path / "p.json").exists()
