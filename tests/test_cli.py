"""The command line: results on standard output, progress on standard error, exit codes that tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attngraph
from attngraph import cli

TINY = "attngraph.models.targets:tiny_decoder_lm"
QUICK = ["--tokens", "24", "--rounds", "1", "--no-torch-compile"]


@pytest.fixture
def in_a_folder_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of targets that are wrong in one way each."""
    (tmp_path / "own_targets.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "x = torch.ones(2, 5, 4)\n"
        "class Heads(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.softmax(x @ x.mT, -2) @ x\n"
        "class Attention(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.softmax(x @ x.mT, -1) @ x\n"
        "def good(): return Attention(), x\n"
        "def unfused(): return Heads(), (x,)\n"
        "def nothing(): return None\n"
        "def raises(): raise KeyError('weights')\n"
        "not_callable = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_targets", raising=False)
    return tmp_path


def test_compiling_a_target_prints_report_check_and_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", TINY, *QUICK]) == 0
    out, err = capsys.readouterr()
    assert "2 of 2 softmax-like places fused" in out
    assert "attention x 2" in out and "causal" in out
    assert "equal to eager" in out and "NOT" not in out
    assert "eager" in out and "attngraph" in out and "median" in out and "peak memory" in out
    assert (
        "building" in err and "capture" in err and "fuse-attention" in err and "checking against eager" in err
    )
    assert "building" not in out


@pytest.mark.usefixtures("in_a_folder_with")
def test_json_is_one_object_with_report_agreement_and_measurements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = "own_targets:good"
    assert cli.main(["compile", target, "--rounds", "1", "--no-torch-compile", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == target
    assert found["inputs"] == "[2, 5, 4]"
    assert len(found["report"]["attention"]) == 1
    assert found["report"]["missed"] == []
    assert found["agreement"]["holds"] is True
    assert set(found["measured"]) == {"eager", "attngraph"}
    assert all(m["seconds"] > 0 for m in found["measured"].values())


def test_dump_writes_the_graph_after_each_pass(in_a_folder_with: Path) -> None:
    tmp_path = in_a_folder_with
    quick = ["--rounds", "1", "--no-torch-compile"]
    assert cli.main(["compile", "own_targets:good", *quick, "--dump", str(tmp_path / "dump")]) == 0
    files = sorted(p.name for p in (tmp_path / "dump" / "graph-0").iterdir())
    assert files[0] == "00-capture.txt"
    assert any("fuse-attention" in f for f in files)
    assert "index.json" in files


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("attngraph.models.targets", "a target is package.module:callable, found 'attngraph.models.targets'"),
        ("no.such.module:thing", "cannot import no.such.module: ModuleNotFoundError"),
        ("attngraph.models.targets:nope", "attngraph.models.targets has no 'nope'; it has"),
        ("own_targets:nothing", "own_targets:nothing must return (model, inputs), it returned NoneType"),
        ("own_targets:raises", "own_targets:raises failed: KeyError: 'weights'"),
        ("own_targets:not_callable", "own_targets:not_callable"),
        (":x", "target"),
        ("own_targets:", "own_targets"),
    ],
)
@pytest.mark.usefixtures("in_a_folder_with")
def test_a_target_that_cannot_be_used_is_exit_code_2_and_one_clear_line(
    target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", target, "--rounds", "1"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert f"attngraph: {message}" in err or message in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.usefixtures("in_a_folder_with")
def test_a_size_that_the_target_does_not_take_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "own_targets:good", "--tokens", "8"]) == 2
    assert "own_targets:good takes no tokens" in capsys.readouterr().err


@pytest.mark.usefixtures("in_a_folder_with")
def test_a_target_in_the_working_directory_is_found_and_a_single_input_will_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["compile", "own_targets:good", "--rounds", "1", "--no-torch-compile"]) == 0
    assert "own_targets.py:9" in capsys.readouterr().out


@pytest.mark.usefixtures("in_a_folder_with")
def test_strict_fails_where_something_is_not_fused(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["compile", "own_targets:unfused", "--rounds", "1", "--no-torch-compile"]
    assert cli.main(plain) == 0
    assert "not fused   own_targets.py:6" in capsys.readouterr().out
    assert cli.main([*plain, "--strict"]) == 1
    assert "own_targets.py:6" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["compile"], ["nonsense"], ["compile", TINY, "--tokens", "many"]])
def test_a_command_that_does_not_parse_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: attngraph" in capsys.readouterr().err


def test_an_unknown_backend_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["compile", TINY, *QUICK, "--backend", "abacus"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert "abacus" in capsys.readouterr().err


@pytest.mark.slow
def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attngraph.cli", "compile", TINY, *QUICK, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["agreement"]["holds"]
    assert "building" in done.stderr


def test_the_gpu_benchmark_measures_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert (
        cli.main(["bench", "--device", "cpu", "--small", "--suite", "decode", "mla", "--json", str(file)])
        == 0
    )
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
    assert cli.main([*small, "--suite", "attention", "decode", "--only", "causal", "tokens"]) == 0
    first = json.loads(file.read_text())["rows"]
    assert {row["cell"] for row in first} == {
        "causal, 2 heads, 64 tokens, width 16", "causal, 2 heads, 64 tokens, width 16, backward"
    }  # fmt: skip
    assert not any(row["name"] in ("flex", "torch.compile") for row in first)
    (ours,) = (row for row in first if row["name"] == "attngraph, warp-specialised")
    assert "runs on a GPU" in ours["problem"]
    assert cli.main([*small, "--minutes", "0"]) == 0
    assert json.loads(file.read_text())["rows"] == first
    assert cli.main([*small, "--only", "causal"]) == 0
    assert json.loads(file.read_text())["rows"] == first, "cells that are known are not measured again"
    assert cli.main([*small, "--only", "full"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows[: len(first)] == first and len(rows) > len(first)
    file.write_text("[]")
    assert cli.main([*small, "--only", "causal"]) == 2
    assert "holds no figures" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_benchmark_of_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "no GPU here" in capsys.readouterr().err


def test_help_shows_where_to_begin_and_what_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for word in (
        "compile",
        "inspect",
        "opt",
        "bisect",
        "show",
        "bench",
        "fuzz",
        "to begin with",
        "exit codes",
    ):
        assert word in out


@pytest.mark.parametrize("command", ["compile", "inspect", "opt", "bisect", "show", "bench", "fuzz"])
def test_every_command_has_an_example_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert "--json" in out
    assert "attngraph" in out.partition("usage:")[2].partition("\n\n")[2]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"attngraph {attngraph.__version__}"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m attngraph.cli show full --queries 512 --tile 1 | head -1"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert not found.stderr
