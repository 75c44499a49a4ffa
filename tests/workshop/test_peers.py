"""The benchmark beside other engines: candidates that are installed answer as eager, lost cells are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngraph.codegen.cpu.toolchain import CompilerError, compiler
from workshop.bench.models import made
from workshop.bench.peers.bandwidth import Memory
from workshop.bench.peers.suite import (
    CANDIDATES,
    MODELS,
    Failure,
    Run,
    Work,
    ask,
    bytes_of_weights,
    lost,
    missing,
    serve,
    works_of,
)
from workshop.processes import Server


@pytest.fixture
def memory() -> Memory:
    try:
        compiler()
    except CompilerError as problem:
        pytest.skip(str(problem))
    return Memory(1 << 20)


CELL = Work("tiny Llama", 2, 1, 5)


def whole_model(cell: Work) -> torch.Tensor:
    """The logits of the token after those that are kept."""
    model = made(MODELS[cell.model])
    with torch.no_grad():
        found: torch.Tensor = model(cell.ids(64)[:, : (cell.kept or 0) + 1]).logits
    return found[:, -1:]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in CANDIDATES])
def test_a_candidate_answers_and_can_be_rewound(name: str) -> None:
    pytest.importorskip("transformers", reason="the transformers package is not installed")
    if reason := missing(name):
        pytest.skip(reason)
    worker = Server(serve, name, CELL.model, 1)
    try:
        seconds = ask(worker, "make")
        if name == "zentorch" and isinstance(seconds, Failure):
            pytest.skip(seconds)
        assert not isinstance(seconds, Failure), seconds
        for _ in range(2):
            answer = ask(worker, "answer", CELL)
            assert not isinstance(answer, Failure), answer
            torch.testing.assert_close(answer[0], whole_model(CELL), rtol=1e-4, atol=1e-5)
            for _ in range(2):
                times = ask(worker, "time", CELL)
                assert not isinstance(times, Failure), times
                assert len(times) == CELL.calls[1]
        prompt, _ = ask(worker, "answer", Work(CELL.model, 2, 12))
        wanted = made(MODELS[CELL.model])(Work(CELL.model, 2, 12).ids(64)).logits[:, -8:]
        torch.testing.assert_close(prompt, wanted, rtol=1e-4, atol=1e-5)
    finally:
        worker.close()


def run_of(memory: Memory, names: list[str], model: str = "tiny Llama") -> Run:
    return Run(model, names, lambda: memory)


@pytest.mark.slow
def test_a_run_compares_answers_then_times_in_turn(memory: Memory) -> None:
    pytest.importorskip("transformers", reason="the transformers package is not installed")
    run = run_of(memory, ["eager", "attngraph"])
    try:
        found = run.measured(CELL, 2)
    finally:
        run.end()
    assert set(found) == {"eager", "attngraph", "floor"}
    assert all(row["seconds"] > 0 for row in found.values())
    assert found["attngraph"]["differs"] < 1e-4


class _Told:
    """A candidate that says what a test wants it to say."""

    def __init__(self, logits: torch.Tensor | str) -> None:
        self.logits = logits

    def ask(self, what: str, *_: Any, limit: float) -> Any:
        if isinstance(self.logits, str):
            return Failure(self.logits)
        return (self.logits, 1.0) if what == "answer" else [0.5]


def test_a_candidate_with_another_answer_is_not_timed(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.ones(1, 1, 4)
    workers: Any = {
        "eager": _Told(right), "near": _Told(right + 1e-4), "far": _Told(right + 1e-2),
        "nan": _Told(right * torch.nan), "broken": _Told("no answer"),
    }  # fmt: skip
    run = run_of(memory, [])
    run.workers, run.made = workers, {name: {} for name in workers}
    monkeypatch.setattr(Run, "bytes", 400_000_000)
    monkeypatch.setattr(memory, "bandwidth", lambda: 20e9)
    found = run.measured(CELL, 1)
    assert {name for name, row in found.items() if "seconds" in row} == {"eager", "near", "floor"}
    assert found["broken"] == {"problem": "no answer"} and "differ" in found["far"]["problem"]
    assert "differ" in found["nan"]["problem"]
    assert found["floor"]["seconds"] == 0.02


def test_a_candidate_that_is_not_installed_is_left_out_with_its_reason(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CANDIDATES, "engine", ("engines", "Engine", ("no_such_engine",)))  # type: ignore[index]
    made = run_of(memory, ["engine"]).made
    assert made == {"engine": {"problem": "left out: no_such_engine is not installed"}}


@pytest.mark.parametrize("ours, is_lost", [(0.025, True), (0.0205, False), (0.018, False)])
def test_a_lost_cell_is_told_in_words(ours: float, is_lost: bool) -> None:
    times = {"floor": 0.001, "eager": 0.03, "OpenVINO": 0.02, "attngraph": ours}
    told = lost(None, [{"cell": "GPT-2, token", "name": n, "seconds": s} for n, s in times.items()])  # type: ignore[arg-type]
    assert told == (
        "LOST: GPT-2, token: attngraph takes 25.0 ms, OpenVINO 20.0 ms (1.25 times as long)." if is_lost
        else "attngraph lost no cell."
    )  # fmt: skip
    times["attngraph, frozen"] = 0.026
    more = lost(None, [{"cell": "GPT-2, token", "name": n, "seconds": s} for n, s in times.items()])  # type: ignore[arg-type]
    assert "attngraph, frozen takes 26.0 ms, OpenVINO 20.0 ms (1.30 times as long)." in more
    assert "has no figure" in lost(None, [{"cell": "a", "name": "eager", "seconds": 1.0}])  # type: ignore[arg-type]


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
    assert [str(c) for c in works_of("GPT-2", False)][:3] == [
        "GPT-2, prompt of 128", "GPT-2, prompt of 1024", "GPT-2, token, 128 kept, batch 1",
    ]  # fmt: skip
    assert len(works_of("GPT-2", False)) == 6
