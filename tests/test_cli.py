"""The command line: results on standard output, progress on standard error, exit codes that tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attngraph
from attngraph import cli, passes
from attngraph.cli.target import load_target
from attngraph.exporter import export
from attngraph.ir import budgets, choices
from attngraph.runtime.executable import Executable
from attngraph.runtime.measure import Measurement

TINY = "attngraph.models.targets:tiny_decoder_lm"
COMMANDS = (
    "compile", "explain", "advise", "demo", "export", "inspect", "opt", "bisect", "show", "bench", "cache",
    "plan", "verify",
)  # fmt: skip
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
        "def unfit(): return nn.Linear(3, 3), x\n"
        "def three(): return 1, 2, 3\n"
        "def stops(): raise SystemExit('no data')\n"
        "class LM(nn.Module):\n"
        "    def __init__(self, width=16):\n"
        "        super().__init__()\n"
        "        self.embed = nn.Embedding(30, width)\n"
        "    def forward(self, ids, mask, targets=None):\n"
        "        x = self.embed(ids) * mask[..., None]\n"
        "        return torch.softmax(x @ x.mT, -1) @ x\n"
        "lm = LM()\n"
        "def made(width=8): return LM(width)\n"
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        (
            "attngraph.models.targets",
            "a target is package.module:NAME, path/file.py:NAME or hf:FOLDER, found",
        ),
        ("no.such.module:thing", "cannot import no.such.module: ModuleNotFoundError"),
        ("attngraph.models.targets:nope", "attngraph.models.targets has no 'nope'; there are"),
        (
            "own_targets:nothing",
            "own_targets:nothing must return a model, or (model, inputs); it returned None",
        ),
        ("hf:nowhere", "hf:nowhere is no checkpoint: there is no file nowhere/config.json"),
        ("nowhere.py:LM", "there is no file nowhere.py"),
        ("own_targets.py", "found 'own_targets.py'. own_targets.py has "),
        ("own_targets:Attention", "is a model whose inputs cannot be guessed"),
        ("own_targets.py:LM(widht=8)", "failed: TypeError: LM.__init__() got an unexpected keyword"),
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


@pytest.mark.slow
@pytest.mark.usefixtures("in_a_folder_with")
def test_a_target_in_the_working_directory_is_found_and_a_single_input_will_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["compile", "own_targets:good", "--rounds", "1", "--no-torch-compile"]) == 0
    assert "own_targets.py:9" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["LM", "LM(width=8)", "lm", "made", "made(width=24)"])
@pytest.mark.parametrize("where", ["own_targets", "own_targets.py", "./own_targets.py"])
@pytest.mark.usefixtures("in_a_folder_with")
def test_a_class_and_a_model_are_targets_and_get_ids_and_a_mask(where: str, name: str) -> None:
    model, (ids, mask) = load_target(f"{where}:{name}", batch=3, tokens=7)
    assert ids.shape == mask.shape == (3, 7)
    assert model(ids, mask).shape == (
        3,
        7,
        8 if "8" in name or name == "made" else 24 if "24" in name else 16,
    )


@pytest.mark.parametrize(
    "kind", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "ViTForImageClassification"]
)
def test_a_checkpoints_folder_is_a_target(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
    sizes = {
        "GPT2LMHeadModel": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 30},
        "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
        "ViTForImageClassification": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    }[kind]
    cls = getattr(transformers, kind)
    cls(cls.config_class(**sizes)).save_pretrained(tmp_path)
    model, inputs = load_target(f"hf:{tmp_path}")
    with torch.no_grad():
        assert model(*inputs).logits.shape[0] == 1


@pytest.mark.parametrize(("more", "by_itself"), [([], True), (["--min-scores", "0"], False)])
def test_a_small_call_is_measured_as_the_library_serves_it_and_that_is_said(
    more: list[str], by_itself: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budgets, "FUSED_SCORES", 1 << 20)
    assert cli.main(["compile", TINY, *QUICK, *more]) == 0
    out = capsys.readouterr().out
    assert ("attngraph ran the model itself: attention is too small" in out) == by_itself
    assert "equal to eager" in out


def test_the_check_against_eager_is_of_the_graph_also_where_the_model_itself_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budgets, "FUSED_SCORES", 1 << 20)
    monkeypatch.setattr(Executable, "__call__", lambda *_: torch.zeros(1, 24, 256))
    assert cli.main(["compile", TINY, *QUICK]) == 1
    assert "NOT equal to eager" in capsys.readouterr().out


@pytest.mark.slow
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
        [sys.executable, "-m", "attngraph", "compile", TINY, *QUICK, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["agreement"]["holds"]
    assert "building" in done.stderr


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
        "python -m workshop",
        "to begin with",
        "exit codes",
    ):
        assert word in out


@pytest.mark.parametrize("command", ["compile", "inspect", "opt", "bisect", "show", "bench"])
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


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m attngraph show full --queries 512 --tile 1 | head -1"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert not found.stderr


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("[")]


def test_help_and_version_import_no_torch() -> None:
    code = "import sys; from attngraph import cli; cli.main(sys.argv[1:])"
    for arguments in (["--version"], ["--help"], *([c, "--help"] for c in COMMANDS)):
        check = f"import atexit; atexit.register(lambda: print('torch' in sys.modules)); {code}"
        found = subprocess.run(
            [sys.executable, "-c", f"import sys; {check}", *arguments], capture_output=True, text=True
        )
        assert found.stdout.splitlines()[-1] == "False", arguments


def test_what_arguments_may_be_is_what_there_is() -> None:
    assert tuple(step.name for step in passes.PASSES) == choices.PASSES
    assert tuple(format.name for format in export.FORMATS.values()) == choices.FORMATS


@pytest.mark.slow
def test_the_package_runs_as_a_program() -> None:
    found = subprocess.run([sys.executable, "-m", "attngraph", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout.strip()) == (0, f"attngraph {attngraph.__version__}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", TINY, "--disable", "nope"], "invalid choice: 'nope'"),
        (["compile", TINY, "--rounds", "0"], "must be a whole number of at least 1, found '0'"),
        (["compile", TINY, "--tokens", "-3"], "must be a whole number of at least 1, found '-3'"),
    ],
)
def test_a_value_out_of_range_is_exit_code_2_and_says_the_range(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", ".", "--out", "nowhere/x.html"], "there is no folder nowhere"),
        (["show", "causal", "--svg", "nowhere/x.svg"], "cannot write nowhere/x.svg"),
        (["compile", TINY, "--tokens", "16", "--disable", "select-kernels"], "cannot be disabled"),
        (["compile", "own_targets:unfit"], "own_targets:unfit: the model cannot be run on the inputs"),
        (["bisect", "own_targets:unfit"], "own_targets:unfit: the model cannot be run on the inputs"),
        (
            ["compile", "own_targets:three"],
            "must return a model, or (model, inputs); it returned (int, int, int).",
        ),
        (["compile", "own_targets:stops"], "own_targets:stops failed: SystemExit: no data"),
        (["compile", TINY, "--tokens", "16", "--backend", "triton"], "no kernel of triton serves"),
        (["export", TINY, "-o", "."], "cannot write .: that is a folder."),
        (["export", TINY, "-o", "/proc/x.pt2"], "cannot write /proc/x.pt2: "),
        (["opt", "nothing.txt", "-p", "canonicalize"], "cannot read nothing.txt: No such file or directory."),
    ],
)
@pytest.mark.usefixtures("in_a_folder_with")
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    (line,) = lines(err)
    assert line.startswith("attngraph: ") and message in line


def test_an_interrupted_command_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attngraph.cli.compile.load_target", interrupt)
    assert cli.main(["compile", TINY]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "attngraph: interrupted"


@pytest.mark.slow
def test_the_demo_says_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attngraph.cli.demo.DEMO", ((TINY, 24),))
    assert cli.main(["demo", "--no-torch-compile", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    assert "2 of 2 softmax-like places fused" in out and "1 model(s), about a minute" in err


@pytest.mark.parametrize("more", [[], ["--full"]])
def test_the_demo_compares_with_inductor_only_in_full(
    more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def spy(candidates: dict[str, Any], **_: Any) -> dict[str, Measurement]:
        seen.extend(candidates)
        return {name: Measurement(1.0, 1.0, 0) for name in candidates}

    monkeypatch.setattr("attngraph.cli.compile.measure", spy)
    monkeypatch.setattr("attngraph.cli.compile.CompiledModule", lambda model, _: attngraph.compile(model))
    monkeypatch.setattr("attngraph.cli.demo.DEMO", ((TINY, 24),))
    monkeypatch.setattr("attngraph.cli.demo.MORE", ())
    assert cli.main(["demo", "--rounds", "1", *more]) == 0
    assert seen == ["eager", "attngraph", "torch.compile", *(["with inductor"] if more else [])]


def test_what_is_measured_is_what_serves_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls run the graph and the model by turns."""
    seen: list[bool] = []

    def spy(candidates: dict[str, Any], **_: Any) -> dict[str, Measurement]:
        compiled = candidates["attngraph"].__closure__[0].cell_contents
        seen.extend([compiled._paces._of != {}, compiled._paces.is_deciding])
        return {name: Measurement(1.0, 1.0, 0) for name in candidates}

    monkeypatch.setattr("attngraph.cli.compile.measure", spy)
    monkeypatch.setattr("attngraph.ir.budgets.FUSED_SCORES", 1)
    assert cli.main(["compile", TINY, "--no-torch-compile"]) == 0
    assert seen == [True, False]


def test_measuring_a_target_tells_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", TINY, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "equal to eager" in out and "peak memory" in out and "softmax-like" not in out


def test_the_demo_without_transformers_says_first_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("attngraph.cli.demo.compile_target", lambda *_: (0, {}))
    assert cli.main(["demo"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("attngraph: without GPT-2, which needs transformers")
    assert not any("gpt2" in line for line in told)
