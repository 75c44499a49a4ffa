"""The benchmark of other packages: models described as data, rows that hide nothing."""

from __future__ import annotations

import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from workshop.bench.packages import table
from workshop.bench.packages.examine import difference, examine
from workshop.bench.packages.models import MODELS, Model, build, call_of
from workshop.bench.packages.table import is_slow, page, summary, verdict
from workshop.processes import Tasks, wait_for_turn

LAYER = "torch.nn:TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)"
STACK = Model("torch", "encoder", f"torch.nn:TransformerEncoder({LAYER}, 1)", "noise(2, 5, 8)")


def _work(name: str, answer: Connection) -> None:
    if name == "slow":
        time.sleep(60)
    if name == "ends":
        raise SystemExit(3)
    answer.send({"task": name, "outcome": "done"})


def test_titles_are_unique_and_no_package_is_one_that_the_project_was_tuned_on() -> None:
    titles = [model.title for model in MODELS]
    assert len(titles) == len(set(titles)) >= 40
    packages = {model.package for model in MODELS}
    assert len(packages) >= 10
    assert not packages & {"timm", "diffusers", "x-transformers", "vit-pytorch", "torchaudio", "monai"}


def test_an_expression_is_built_with_all_its_parts() -> None:
    layer = build("torch.nn:Sequential(torch.nn:Linear(3, out_features=4))")
    assert layer[0].weight.shape == (4, 3)
    assert build("torch.nn:Linear.forward") is torch.nn.Linear.forward
    (a, b), named = call_of("noise(2, 3), ids((4,), 9, 5), mask=given((1, 2)), more={'a': 'x:y', 'b': [3]}")
    assert a.shape == (2, 3)
    assert 5 <= int(b.min()) <= int(b.max()) < 9
    assert named["mask"].tolist() == [1, 2] and named["more"] == {"a": "x:y", "b": [3]}


@pytest.mark.parametrize(("found", "expected", "result"), [
    ([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.5])], 0.2),
    ([torch.tensor([1.0])], [torch.tensor([float("nan")])], float("inf")),
    ([torch.tensor([1])], [torch.tensor([2])], float("inf")),
    ([torch.ones(2)], [torch.ones(3)], float("inf")),
])  # fmt: skip
def test_the_difference_is_relative_and_misses_nothing(found: Any, expected: Any, result: float) -> None:
    assert difference(found, expected) == pytest.approx(result)


def test_a_model_is_compared_and_its_places_counted() -> None:
    row = examine("attngraph", STACK)
    assert row["fused"] == 1
    assert not row["missed"]
    assert verdict(row) == "close"
    assert examine("attngraph", Model("torch", "none", "torch.nn:Linear(3)", ""))["outcome"] == (
        "does not run"
    )


def test_only_float64_acquits_a_large_difference() -> None:
    assert verdict({"difference": 1e-3, "ours to float64": 1e-4, "eager to float64": 1e-3}) == "rounding"
    assert verdict({"difference": 1e-3, "ours to float64": 1e-3, "eager to float64": 1e-6}) == "wrong"
    assert verdict({"difference": 1e-3, "float64": "does not run"}) == "wrong"
    assert verdict({"difference": 1.0, "repeated": 1.0}) == "random"


def test_the_page_prints_lost_rows_and_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Model(package, "M", LAYER, "") for package in ("here", "late", "gone")]
    monkeypatch.setattr(table, "installed", lambda package: None if package == "gone" else "1.0")
    ours = {"fused": 1, "missed": {"a | b": 2}, "graphs": 3, "pieces": ["because"], "difference": 1e-7,
            "seconds": 30.0, "building": 0.0}  # fmt: skip
    rows = {
        "attngraph: here M": ours, "torch.compile: here M": {"seconds": 4.0, "building": 9.0},
        "attngraph: late M": {"outcome": "out of time", "reason": "longer than 9 s"},
    }  # fmt: skip
    found = page(models, rows)
    assert "| here 1.0 | M (1 of 3, 3 pieces) | 1 of 3 | 1e-07 | 30.0 | 4.0 + 9 |" in found
    assert "- not fused: a \\| b: M" in found
    assert "- in pieces: because: M" in found
    assert "| late 1.0 | M (out of time) |" in found
    assert "| gone | M (not installed here, so not run) |" in found
    assert "timed on 1; of these, 1 take attngraph over 20 s" in summary(models, rows)
    assert not is_slow(ours, {"seconds": 40.0, "building": 0.0})


@pytest.mark.slow
def test_every_task_has_a_row() -> None:
    tasks = Tasks(_work, "workshop.processes")
    rows = [tasks.one(name, 15) for name in ("good", "ends", "slow")]
    assert [row["task"] for row in rows] == ["good", "ends", "slow"]
    assert [row["outcome"] for row in rows] == ["done", "failed", "out of time"]


def _in_turns(name: str, answer: Connection, file: Path) -> None:
    if name == "fails":
        answer.send({"task": name, "outcome": "failed"})
        return
    if name == "ends":
        raise SystemExit(3)
    if name == "never":
        time.sleep(60)
    with file.open("a") as out:
        out.write(f"{name} prepares\n")
    wait_for_turn(answer)
    with file.open("a") as out:
        out.write(f"{name} begins\n")
        out.flush()
        time.sleep(60 if name == "slow" else 0.2)
        out.write(f"{name} ends\n")
    answer.send({"task": name, "outcome": "done"})


@pytest.mark.slow
def test_tasks_prepare_together_and_work_one_after_another(tmp_path: Path) -> None:
    file = tmp_path / "said"
    names = ["a", "fails", "b", "ends", "slow", "never", "c"]
    rows = Tasks(partial(_in_turns, file=file), "workshop.processes").in_turns(names, 15)
    assert [row["task"] for row in rows] == names
    assert [row["outcome"] for row in rows] == [
        "done", "failed", "done", "failed", "out of time", "out of time", "done",
    ]  # fmt: skip
    said = file.read_text().splitlines()
    assert sorted(said[:4]) == ["a prepares", "b prepares", "c prepares", "slow prepares"]
    assert said[4:] == ["a begins", "a ends", "b begins", "b ends", "slow begins", "c begins", "c ends"]
