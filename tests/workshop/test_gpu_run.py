"""A run on a borrowed GPU, as far as that goes without one: its stages and their time, and what is kept."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from workshop.__main__ import main
from workshop.bench import gpu, gpu_run
from workshop.bench.processes import Tasks
from workshop.bench.scorecard.cells import CELLS

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A run of tasks that take no time but by a clock of the test's; `takes` says how long each is, or what
    its row is."""

    def go(
        takes: Callable[[str], float | dict[str, Any]], minutes: float = 10, **more: Any
    ) -> dict[str, Any]:
        now = [0.0]
        file = tmp_path / "card.json"

        def one(self: Tasks, name: str, limit: float) -> dict[str, Any]:
            found = takes(name)
            if isinstance(found, dict):
                return {"task": name, **found}
            now[0] += min(found, limit)
            outcome = "done" if found <= limit else "out of time"
            return {"task": name, "outcome": outcome, "reason": "", "rows": [], "blocks": {}}

        def in_turns(self: Tasks, names: Sequence[str], limit: float, until: float) -> list[dict[str, Any]]:
            return [one(self, name, max(0.0, min(limit, until - now[0]))) for name in names]

        monkeypatch.setattr(Tasks, "in_turns", in_turns)
        monkeypatch.setattr(gpu_run.time, "monotonic", lambda: now[0])
        given = {"resume": False, "only": (), **more}
        found = gpu_run.run("cuda", False, minutes, file, say=lambda _: None, **given)
        assert json.loads(file.read_text()) == found
        return {**found, "spent": now[0]}

    return go


def outcomes(found: dict[str, Any], stage: str) -> list[str]:
    return [row["outcome"] for name, row in found["tasks"].items() if name.startswith(f"{stage}:")]


def test_the_cells_are_those_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    class Ask(gpu.Part):
        def has(self, cell: str) -> bool:
            asked.add(cell)
            return False

    monkeypatch.setattr(gpu, "limits", lambda *_: gpu.Limits(1, 1))
    clock = type("Clock", (), {"device": "cpu", "is_cuda": False})
    monkeypatch.setattr(gpu, "Clock", lambda device, turn: clock)
    for small in (False, True):
        asked.clear()
        gpu.run(gpu.SUITES, "cpu", small=small, say=lambda _: None, part=Ask())
        assert set(gpu_run.cells(small)) <= asked


def test_tasks_are_checks_then_measurements_then_tuning() -> None:
    names = gpu_run.tasks(False)
    stages = [name.partition(":")[0] for name in names]
    assert list(dict.fromkeys(stages)) == list(gpu_run.SHARES) == list(gpu_run.LIMITS)
    assert stages == sorted(stages, key=list(gpu_run.SHARES).index)
    assert len(set(names)) == len(names) and {n.partition(": ")[2] for n in names} >= set(CELLS)
    assert list(gpu_run.SHARES.values()) == sorted(gpu_run.SHARES.values())


@pytest.mark.parametrize("seconds", [1.0, 30.0, 100.0, 1e9])
def test_a_run_ends_in_time_and_lists_what_was_not_begun(run: Run, seconds: float) -> None:
    found = run(lambda _: seconds)
    assert found["spent"] <= 10 * 60
    assert set(found["tasks"]) == set(gpu_run.tasks(False))
    told = {row["outcome"] for row in found["tasks"].values()}
    assert told == (
        {"done"} if seconds == 1 else {"done", "not begun"} if seconds < 150 else {"out of time", "not begun"}
    )
    for stage in gpu_run.SHARES:
        begun = [outcome != "not begun" for outcome in outcomes(found, stage)]
        assert begun == sorted(begun, reverse=True)
    assert set(outcomes(found, gpu_run.MEASURE)) != {"not begun"}, "checks do not take all of the time"


def test_what_fails_costs_its_task_alone(run: Run) -> None:
    def takes(name: str) -> float | dict[str, Any]:
        return {"outcome": "failed", "reason": "its process ended with -6"} if "64" in name else 1.0

    found = run(takes)
    assert {"failed", "done"} == {row["outcome"] for row in found["tasks"].values()}
    assert gpu_run.is_right(found)
    assert "check: causal 64: failed: its process ended with -6" in gpu_run.table(found)


def test_a_wrong_answer_is_told(run: Run) -> None:
    wrong = {"outcome": "differs", "reason": "dq: 3 of 70 rows are off"}
    found = run(lambda name: wrong if name == "check: causal 128" else 1.0)
    assert not gpu_run.is_right(found)
    table = gpu_run.table(found)
    assert f"{len(CELLS) - 1} of {len(CELLS)} kernels checked and right" in table
    assert "check: causal 128: differs: dq: 3 of 70 rows are off" in table


def test_a_run_goes_on_where_it_ended(run: Run) -> None:
    first = run(lambda _: 100.0)
    asked: list[str] = []
    second = run(lambda name: asked.append(name) or 1.0, resume=True)
    done = {name for name, row in first["tasks"].items() if row["outcome"] == "done"}
    assert done and done.isdisjoint(asked) and done | set(asked) == set(gpu_run.tasks(False))
    assert all(row["outcome"] == "done" for row in second["tasks"].values())


def dry(file: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(file.parent / "cache")}
    command = ["bench", "--suite", "gpu", "--small", "--device", "cpu", "--json", str(file), *more]
    return subprocess.run(
        [sys.executable, "-m", "workshop", *command], env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_dry_run_checks_a_kernel(tmp_path: Path) -> None:
    done = dry(tmp_path / "card.json", "--only", "check: causal 64")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 kernels checked and right" in done.stdout


@pytest.mark.slow
def test_a_dry_run_does_all_of_it(tmp_path: Path) -> None:
    done = dry(tmp_path / "card.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "card.json").read_text())
    assert {row["outcome"] for row in found["tasks"].values()} == {"done"}
    assert found["about"]["device"] == "cpu"
    tuned = next(row for name, row in found["tasks"].items() if name.startswith("tune:"))
    assert len(tuned["blocks"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "--suite gpu needs a GPU"),
        (["--device", "cpu", "--suite", "gpu", "mla", "--small"], "is a run of its own"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--suite", "gpu", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_what_tasks_share_does_not_touch_the_gpu_before_they_are_forked() -> None:
    """A process that has used CUDA cannot be forked."""
    code = """
import torch
def asked(*_): raise AssertionError("CUDA was asked for")
torch._C._cuda_getDeviceCount = torch._C._cuda_init = asked
import torch.cuda
torch.cuda.is_available = torch.cuda.device_count = asked
import workshop.bench.gpu_tasks
print("not asked")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "not asked", done.stderr
