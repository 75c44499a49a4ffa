"""The commands of the workshop: what they refuse, in one line and before measuring; parts; resuming."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workshop import arguments
from workshop.__main__ import main
from workshop.bench import gpu

TINY = "attngraph.models.targets:tiny_decoder_lm"


def test_what_arguments_may_be_is_what_there_is() -> None:
    assert arguments.SUITES == gpu.SUITES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fuzz", "--minutes", "-1"], "must be a number of at least 0"),
        (["fuzz", "--graphs", "0"], "at least 1"),
    ],
)
def test_a_value_out_of_range_is_exit_code_2_and_says_the_range(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "--json", "nowhere/x.json"],
            "--json: cannot write nowhere/x.json: there is no folder nowhere.",
        ),
        (["bench", "--plot", "."], "--plot: cannot write .: that is a folder."),
        (["bench", "--only", "foo"], "--only is for a run on a GPU, or with --small."),
        (["bench", "--minutes", "3"], "--minutes is for a run on a GPU, or with --small."),
        (["bench", "--small", "--only", "foo"], "--only foo: no cell of these suites has all of that"),
        (["fuzz", "--out", "/proc/x"], "--out: cannot write to /proc/x: "),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = (line for line in err.splitlines() if not line.startswith("["))
    assert line.startswith("workshop: ") and message in line


@pytest.mark.slow
def test_the_gpu_benchmark_measures_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert main(["bench", "--device", "cpu", "--small", "--suite", "decode", "mla", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["limits"]["flops"] > 0
    assert {row["cell"].split(",")[0] for row in found["rows"]} == {"decode", "mla"}
    for row in found["rows"]:
        assert row["problem"] or row["seconds"] > 0
        assert row["cell"] in shown
    assert "GB/s" in shown


def test_the_gpu_benchmark_measures_a_part_and_goes_on_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    small = ["bench", "--device", "cpu", "--small", "--json", str(file), "--without", "flex", "flex tuned"]
    small += ["torch.compile", "--resume"]
    assert main([*small, "--suite", "attention", "decode", "--only", "causal", "tokens"]) == 0
    first = json.loads(file.read_text())["rows"]
    assert {row["cell"] for row in first} == {
        "causal, 2 heads, 64 tokens, width 16", "causal, 2 heads, 64 tokens, width 16, backward"
    }  # fmt: skip
    assert not any(row["name"] in ("flex", "torch.compile") for row in first)
    without = [row for row in first if row["name"] == "sdpa cudnn"]
    assert len(without) == 2 and all("No viable backend" in row["problem"] for row in without)
    assert main([*small, "--minutes", "0"]) == 0
    assert json.loads(file.read_text())["rows"] == first
    assert main([*small, "--only", "causal"]) == 0
    assert json.loads(file.read_text())["rows"] == first, "cells that are known are not measured again"
    assert main([*small, "--only", "full"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows[: len(first)] == first and len(rows) > len(first)
    file.write_text("[]")
    assert main([*small, "--only", "causal"]) == 2
    assert "holds no figures" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_benchmark_of_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    assert "no GPU here" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(gpu, "run", lambda *_, **__: pytest.fail("measured"))
    assert main(["bench", "--small", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_of_models_is_the_demo_and_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attngraph.cli.demo.DEMO", ((TINY, 24),))
    monkeypatch.setattr("attngraph.cli.compile._candidates", lambda model, compiled, inputs, *_: {
        "eager": lambda: model(*inputs), "attngraph": lambda: compiled(*inputs)
    })  # fmt: skip
    file = tmp_path / "models.json"
    assert main(["bench", "--device", "cpu", "--suite", "models", "--json", str(file)]) == 0
    assert "2 of 2 softmax-like places fused" in capsys.readouterr().out
    (found,) = json.loads(file.read_text())
    assert found["target"] == TINY and found["agreement"]["holds"]


def test_the_small_benchmark_of_models_is_tiny_and_says_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int, int]] = []

    def one(target: str, given: argparse.Namespace, tokens: int) -> tuple[int, dict[str, Any]]:
        asked.append((target, tokens, given.rounds))
        return 0, {}

    monkeypatch.setattr("attngraph.cli.demo.compile_target", one)
    assert main(["bench", "--device", "cpu", "--suite", "models", "--small"]) == 0
    assert asked[0] == (TINY, 64, 1) and all(tokens <= 128 for _, tokens, _ in asked)
    assert "2 model(s), under a minute on two cores" in capsys.readouterr().err


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(gpu, "run", lambda *_, **__: pytest.fail("measured"))
    assert main(["bench", "--small", "--plot", "x.xyz"]) == 2
    assert "--plot: x.xyz: the name of a picture may end in" in capsys.readouterr().err


def test_why_candidates_were_not_measured_is_told_once() -> None:
    rows = [gpu.Row(f"cell {n}", name, problem="needs a GPU") for n in range(3) for name in ("a", "b")]
    rows.append(gpu.Row("cell 2", "c", 1.0, 1.0, None, 0.5))
    shown = gpu.table({"device": "d", "torch": "t", "dtype": "x", "limits": {"flops": 1, "bytes": 1}}, rows)
    assert shown.splitlines()[-2:] == ["not measured", "  a, b (3 cells): needs a GPU"]
