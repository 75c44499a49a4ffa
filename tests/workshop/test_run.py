"""A run: processes that may die, counts that do not depend on them, and the command line."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workshop.__main__ import main
from workshop.fuzz import run as fuzzing
from workshop.fuzz import worker as workers
from workshop.fuzz.compare import Outcome
from workshop.fuzz.grammar import Case
from workshop.fuzz.run import Options, Summary, run
from workshop.fuzz.sample import case_of
from workshop.fuzz.worker import Worker


class Does:
    """What the process that receives it does instead of a case."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.does = (function, args)

    def __reduce__(self) -> Any:
        return self.does


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def counted(summary: Summary) -> dict[str, Any]:
    return {**summary.to_json(), "seconds": 0}


def test_a_short_run_finds_no_difference() -> None:
    lines: list[str] = []
    summary = run(Options(seed=0, graphs=30, jobs=1), lines.append)
    assert not summary.failures, str(summary)
    assert summary.graphs == 30
    assert summary.attention == sum(case_of(0, number).is_attention for number in range(30))
    assert 0 < summary.fused <= summary.attention
    assert summary.eager_raises == 0
    assert any("graphs" in line and "of attention fused" in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_run_finds_no_difference() -> None:
    summary = run(Options(seed=1, graphs=500, jobs=2))
    assert not summary.failures, str(summary)
    assert summary.graphs == 500


@pytest.mark.slow
def test_how_many_processes_there_are_changes_nothing() -> None:
    one, two = (run(Options(seed=2, graphs=8, jobs=jobs)) for jobs in (1, 2))
    for summary in (one, two):
        for entry in summary.unfused:
            entry.examples.sort()
        summary.unfused.sort(key=lambda entry: entry.reason)
    assert counted(one) == counted(two)


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_failure_of_its_case_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.run(Case(), 0).kind == ""
    monkeypatch.setattr(workers, "LONGEST_WAIT", 0.5)
    waited = worker.run(Does(time.sleep, 600), 0)  # type: ignore[arg-type]
    assert (waited.kind, waited.detail) == ("hangs", "no answer in 0 s")
    monkeypatch.undo()
    died = worker.run(Does(os._exit, 3), 0)  # type: ignore[arg-type]
    assert (died.kind, died.detail) == ("crashes", "its process ended with 3")
    spent = worker.run(Does(signal.raise_signal, signal.SIGPROF), 0)  # type: ignore[arg-type]
    assert (spent.kind, spent.failed) == ("hangs", True)


class WrongAboutSoftcaps:
    """Stands for a process: says that whatever has a softcap is wrong, and masks are not fused."""

    def run(self, case: Case, seed: int) -> Outcome:
        if case.softcap != "none":
            return Outcome("result: wrong", "off by 1", 1)
        return Outcome("", "", int(case.mask == "none"), ("masked at 3",) if case.mask != "none" else (), 1)

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "Worker", WrongAboutSoftcaps)


@pytest.mark.usefixtures("without_processes")
def test_failures_are_made_small_counted_and_written(tmp_path: Path) -> None:
    summary = run(Options(seed=0, graphs=60, jobs=2, out=tmp_path / "found"))
    wrong = [n for n in range(60) if case_of(0, n).softcap != "none"]
    assert [f.number for f in summary.failures] == wrong
    assert len(wrong) > fuzzing.PER_KIND
    smallest = [f.smallest for f in summary.failures]
    assert set(smallest[: fuzzing.PER_KIND]) <= {"softcap=before_bias", "softcap=after_bias"}
    assert not any(smallest[fuzzing.PER_KIND :])
    for failure in summary.failures:
        assert Path(failure.path).read_text(encoding="utf-8") == failure.test
    attention = [case_of(0, n) for n in range(60) if n not in wrong and case_of(0, n).is_attention]
    assert (summary.attention, summary.fused) == (len(attention), sum(c.mask == "none" for c in attention))
    assert [(u.reason, u.count) for u in summary.unfused] == [
        ("masked at N", summary.attention - summary.fused)
    ]
    assert f"FAILED graph {wrong[0]}: result: wrong: off by 1" in str(summary)
    assert "def test_compiled_equals_eager" in str(summary)


def test_a_failure_that_does_not_come_again_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([Outcome("result: wrong", "off by 1")])

    class WrongOnce(WrongAboutSoftcaps):
        def run(self, case: Case, seed: int) -> Outcome:
            return next(outcomes, Outcome())

    monkeypatch.setattr(fuzzing, "Worker", WrongOnce)
    (failure,) = run(Options(seed=0, graphs=1, jobs=1)).failures
    assert failure.detail == "off by 1 (not in another process)"
    assert not failure.smallest


@pytest.mark.usefixtures("without_processes")
def test_a_run_ends_when_its_time_is_up() -> None:
    summary = run(Options(seed=4, minutes=0.0, jobs=1))
    assert summary.graphs == 0
    assert not summary.failures


@pytest.mark.usefixtures("without_processes")
def test_the_exit_code_is_1_where_something_failed_and_0_where_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = next(n for n in range(100) if case_of(0, n).softcap != "none")
    right = next(n for n in range(100) if case_of(0, n).softcap == "none")
    assert main(["fuzz", "--only", str(wrong), "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert str(case_of(0, wrong)) in out
    assert "def f(" in out and "# call 1" in out
    assert [p.name for p in tmp_path.iterdir()] == [f"test_seed_0_graph_{wrong}.py"]
    assert main(["fuzz", "--only", str(right), "--jobs", "1"]) == 0
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.usefixtures("without_processes")
def test_json_is_one_object_with_counts_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["fuzz", "--graphs", "20", "--seed", "0", "--jobs", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["graphs"] == 20
    assert code == int(bool(found["failures"]))
    assert {"number", "kind", "detail", "case", "smallest", "test"} <= set(found["failures"][0])


def test_no_process_is_an_unusable_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fuzz", "--jobs", "0"])
    assert "--jobs: must be a whole number of at least 1" in capsys.readouterr().err


def test_reasons_are_counted_without_the_values_of_one_graph() -> None:
    reason = "its value differs at sizes (s26=3, s0=5): 0.25 instead of 1.5e-07 at [3, 0]"
    assert fuzzing.general(reason) == "its value differs at sizes (...): N instead of N at [N, N]"
