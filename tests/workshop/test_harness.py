"""The harness: cells that are asked for are measured once, kept in a file, shown as a table and drawn; and
what the commands of the workshop refuse, in one line and before anything is measured."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph.cli import run_told
from workshop.__main__ import COMMANDS, main
from workshop.harness import Cell, Suite, draw, in_turns, known, markdown, shown, table

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run() -> Run:
    """Runs a suite of two cells of two candidates; the exit code, and the cells that were measured."""

    def go(*argv: str, **more: Any) -> tuple[int, list[str]]:
        measured: list[str] = []

        def figures(cell: str) -> dict[str, dict[str, Any]]:
            measured.append(cell)
            assert torch.is_grad_enabled() == more.get("gradients", False)
            return {
                "ours": {"seconds": 0.002, "bytes": 4096},
                "theirs": {"seconds": 0.003},
                "none": {"problem": "no"},
            }

        cells = [Cell(name, functools.partial(figures, name)) for name in ("full 64", "causal 64")]
        suite = Suite("mine", "What it is.", lambda options: iter(cells), base="ours", **more)
        return run_told("workshop", lambda: suite.main(argv)), measured

    return go


def test_cells_are_measured_and_shown_beside_the_base(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == (0, ["full 64", "causal 64"])
    assert capsys.readouterr().out.splitlines() == [
        "             ms  bytes  of ours",
        "full 64", "  ours     2.00  4,096     1.00", "  theirs   3.00            1.50",
        "causal 64", "  ours     2.00  4,096     1.00", "  theirs   3.00            1.50",
        "", "not measured", "  none (2 cells): no",
    ]  # fmt: skip


def test_a_run_goes_on_from_its_file(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    file = ["--json", str(tmp_path / "found.json")]
    assert run(*file, "--only", "causal") == (0, ["causal 64"])
    assert run(*file, "--resume", "--minutes", "0") == (0, [])
    assert run(*file, "--resume") == (0, ["full 64"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["cell"] for row in found["rows"]] == ["causal 64"] * 3 + ["full 64"] * 3
    assert found["torch"] == torch.__version__ and found["processor"] and found["date"]
    (tmp_path / "found.json").write_text("[]")
    assert run(*file, "--resume") == (2, [])
    assert "holds no figures" in capsys.readouterr().err


def test_what_is_said_below_the_table_and_the_exit_code_are_the_suites(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    def after(_: object, rows: Any) -> str:
        return f"{len(rows)} rows"

    assert run(after=after, fails=lambda rows: True, tabled=False, gradients=True)[0] == 1
    assert capsys.readouterr().out == "6 rows\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--json", "nowhere/x.json"], "--json: cannot write nowhere/x.json: there is no folder nowhere."),
        (["--plot", "."], "--plot: cannot write .: that is a folder."),
        (["--plot", "x.xyz"], "--plot: x.xyz: the name of a picture may end in"),
        (["--only", "foo"], "--only foo: no cell has all of that in its name."),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_is_measured(
    run: Run, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "x.xyz" in argv:
        pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    assert run(*argv) == (2, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("workshop: ") and message in line


def test_a_plot_without_matplotlib_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--plot", "x.png") == (2, [])
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_figures_are_drawn_and_cells_may_lack_a_candidate(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    assert run("--plot", str(tmp_path / "p.svg"))[0] == 0
    assert "</svg>" in (tmp_path / "p.svg").read_text()
    rows = [{"cell": "a", "name": "x", "share": 0.5}, {"cell": "b", "name": "y", "share": 0.01}]
    draw(rows, "share", "t", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


DIGITS = (
    (12345.6, "12,346"), (123.45, "123.5"), (1.234, "1.23"), (0.01234, "0.0123"), (0.0, "0.00"), (7, "7"),
    (True, "True"), ("words", "words"),
)  # fmt: skip


@pytest.mark.parametrize(("value", "text"), DIGITS)
def test_a_figure_has_as_many_digits_as_tell_something(value: Any, text: str) -> None:
    assert shown(value) == text


def test_a_table_of_problems_alone_has_no_head() -> None:
    rows = [{"cell": f"cell {n}", "name": name, "problem": "needs a GPU"} for n in range(3) for name in "ab"]
    assert table(rows).splitlines() == ["", "not measured", "  a, b (3 cells): needs a GPU"]
    assert markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_calls_take_turns_and_the_first_are_not_counted() -> None:
    said: list[str] = []
    found = in_turns({name: functools.partial(said.append, name) for name in "ab"}, 3, skipped=1)
    assert said == ["a", "b"] * 3 and set(found) == {"a", "b"}


# --- the commands ---


def test_the_list_of_commands_needs_no_torch() -> None:
    code = "import sys; from workshop.__main__ import main; main(['--help']); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.splitlines()[-1] == "False" and all(f"  {name} " in found for name in COMMANDS)


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert "there is no command nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: python -m workshop {command}" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gpu", "--device", "cuda"], "no GPU here"),
        (["gpu", "--device", "cpu"], "tiny cells, with --small"),
        (["card", "--device", "cpu"], "card needs a GPU"),
        (["fuzz", "--out", "/proc/x"], "--out: cannot write to /proc/x: "),
    ],
)
def test_a_command_that_cannot_run_here(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fuzz", "--minutes", "-1"], "must be a number of at least 0"),
        (["fuzz", "--graphs", "0"], "at least 1"),
        (["search", "around", "--count", "0"], "at least 1"),
    ],
)
def test_a_value_out_of_range_says_the_range(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_attention_over_a_cache_is_measured_tiny(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    small = ["gpu", "--device", "cpu", "--small", "--json", str(file), "--without", "flex"]
    assert main([*small, "--suite", "decode", "mla"]) == 0
    found = json.loads(file.read_text())
    assert found["limits"]["flops"] > 0
    assert {row["cell"].split(",")[0] for row in found["rows"]} == {"decode", "mla"}
    assert {row["name"] for row in found["rows"]} == {"attngraph", "sdpa"}
    for row in found["rows"]:
        assert row["problem"] if "problem" in row else row["seconds"] > 0 and row["gbytes"] > 0


def test_the_backward_pass_is_a_cell_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    without = ["--without", "flex", "flex tuned", "torch.compile"]
    small = ["gpu", "--device", "cpu", "--small", "--json", str(file), *without, "--resume"]
    assert main([*small, "--only", "causal", "backward"]) == 0
    assert main([*small, "--only", "causal"]) == 0
    rows = json.loads(file.read_text())["rows"]
    cell = "causal, 2 heads, 64 tokens, width 16"
    assert list(dict.fromkeys(row["cell"] for row in rows)) == [f"{cell}, backward", cell]
    failed = [row for row in rows if row["name"] == "sdpa cudnn"]
    assert len(failed) == 2 and all("No viable backend" in row["problem"] for row in failed)
    assert all(row["seconds"] > 0 for row in rows if row["name"] in ("attngraph", "unfused"))
    assert known(type("Given", (), {"resume": True, "json": file})()) == rows  # type: ignore[arg-type]


SMALL = (
    "models", "training", "narrow-caches", "decode", "states", "mla", "call-checks", "attention", "whole",
    "same-bits", "cost-of-order",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALL)
def test_a_suite_runs_small(command: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the transformers package is not installed")
    file = tmp_path / "found.json"
    assert main([command, "--small", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows and not any(row.get("problem") for row in rows)
    if command == "narrow-caches":
        sizes = {row["name"]: row["bytes_per_token"] for row in rows if "bytes_per_token" in row}
        assert sizes["float32"] == 3.2 * sizes["int8"]  # 16 wide, and a scale
        largest = {row["name"]: row["largest"] for row in rows if "largest" in row}
        assert largest["float32"] < 1e-6 < largest["int8"]
