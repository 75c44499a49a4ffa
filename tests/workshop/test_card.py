"""A run on a borrowed GPU, as far as that goes without one: its stages and their time, and what is kept."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from workshop.bench import card, gpu
from workshop.bench.scorecard.cells import CELLS
from workshop.processes import Tasks

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
        monkeypatch.setattr(card.time, "monotonic", lambda: now[0])
        given = {"resume": False, "only": (), **more}
        found = card.run("cuda", False, minutes, file, say=lambda _: None, **given)
        assert json.loads(file.read_text()) == found
        return {**found, "spent": now[0]}

    return go


def outcomes(found: dict[str, Any], stage: str) -> list[str]:
    return [row["outcome"] for name, row in found["tasks"].items() if name.startswith(f"{stage}:")]


def test_the_cells_are_those_of_the_benchmark() -> None:
    for small in (False, True):
        assert set(card.cells(small)) <= {work.name for work in gpu.works(gpu.How("cpu", small))}


def test_tasks_are_checks_then_measurements_then_tuning() -> None:
    names = card.tasks(False)
    stages = [name.partition(":")[0] for name in names]
    assert list(dict.fromkeys(stages)) == list(card.SHARES) == list(card.LIMITS)
    assert stages == sorted(stages, key=list(card.SHARES).index)
    assert len(set(names)) == len(names) and {n.partition(": ")[2] for n in names} >= set(CELLS)
    assert list(card.SHARES.values()) == sorted(card.SHARES.values())


@pytest.mark.parametrize("seconds", [1.0, 30.0, 100.0, 1e9])
def test_a_run_ends_in_time_and_lists_what_was_not_begun(run: Run, seconds: float) -> None:
    found = run(lambda _: seconds)
    assert found["spent"] <= 10 * 60
    assert set(found["tasks"]) == set(card.tasks(False))
    told = {row["outcome"] for row in found["tasks"].values()}
    assert told == (
        {"done"} if seconds == 1 else {"done", "not begun"} if seconds < 150 else {"out of time", "not begun"}
    )
    for stage in card.SHARES:
        begun = [outcome != "not begun" for outcome in outcomes(found, stage)]
        assert begun == sorted(begun, reverse=True)
    assert set(outcomes(found, card.MEASURE)) != {"not begun"}, "checks do not take all of the time"


def test_what_fails_costs_its_task_alone(run: Run) -> None:
    def takes(name: str) -> float | dict[str, Any]:
        return {"outcome": "failed", "reason": "its process ended with -6"} if "64" in name else 1.0

    found = run(takes)
    assert {"failed", "done"} == {row["outcome"] for row in found["tasks"].values()}
    assert card.is_right(found)
    assert "check: causal 64: failed: its process ended with -6" in card.table(found)


def test_a_wrong_answer_is_told(run: Run) -> None:
    wrong = {"outcome": "differs", "reason": "dq: 3 of 70 rows are off"}
    found = run(lambda name: wrong if name == "check: causal 128" else 1.0)
    assert not card.is_right(found)
    table = card.table(found)
    assert f"{len(CELLS) - 1} of {len(CELLS)} kernels checked and right" in table
    assert "check: causal 128: differs: dq: 3 of 70 rows are off" in table


def test_a_run_goes_on_where_it_ended(run: Run) -> None:
    first = run(lambda _: 100.0)
    asked: list[str] = []
    second = run(lambda name: asked.append(name) or 1.0, resume=True)
    done = {name for name, row in first["tasks"].items() if row["outcome"] == "done"}
    assert done and done.isdisjoint(asked) and done | set(asked) == set(card.tasks(False))
    assert all(row["outcome"] == "done" for row in second["tasks"].values())


def dry(file: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(file.parent / "cache")}
    command = ["card", "--small", "--device", "cpu", "--json", str(file), *more]
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


@pytest.mark.slow
def test_what_tasks_share_does_not_touch_the_gpu_before_they_are_forked() -> None:
    """A process that has used CUDA cannot be forked."""
    code = """
import torch
def asked(*_): raise AssertionError("CUDA was asked for")
torch._C._cuda_getDeviceCount = torch._C._cuda_init = asked
import torch.cuda
torch.cuda.is_available = torch.cuda.device_count = asked
import workshop.bench.card_tasks
print("not asked")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "not asked", done.stderr
