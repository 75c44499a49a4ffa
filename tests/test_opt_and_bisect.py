"""`attngraph opt` runs passes on a dumped graph; `attngraph bisect` names the pass that changes an answer."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph import cli
from attngraph.api.bisect import bisect
from attngraph.api.options import Options
from attngraph.ir.graph.program_graph import Level, ProgramGraph
from attngraph.passes import DEFAULT_PIPELINE
from attngraph.pipeline import Outcome
from attngraph.report.dump import decode, encode, read_graph_file

TINY = "attngraph.models.targets:tiny_decoder_lm"


class Buffered(torch.nn.Module):
    """Causal by a buffer, whose contents decide what the attention is."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        return (x @ x.mT).masked_fill(~self.mask[:t, :t], float("-inf")).softmax(-1) @ x


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    attngraph.compile(Buffered(), dump=tmp_path)(torch.randn(2, 7, 8))
    return tmp_path / "graph-0"


def test_opt_runs_the_passes_and_prints_a_text_that_opt_reads(
    dumped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["opt", str(dumped / "00-capture.txt"), "-p", "canonicalize,fuse-attention"]) == 0
    out = capsys.readouterr().out
    assert "keep k <= q" in out
    assert "kernel=" not in out
    (tmp_path / "next.txt").write_text(out)
    more = "merge-heads,absorb-mla(absorb='never'),reassociate-linear,select-kernels(backend='reference')"
    assert cli.main(["opt", str(tmp_path / "next.txt"), "-p", more]) == 0
    assert "kernel=reference" in capsys.readouterr().out


def test_opt_gives_what_compiling_gave(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ",".join(step.name for step in DEFAULT_PIPELINE)
    assert cli.main(["opt", str(dumped / "00-capture.txt"), "-p", names]) == 0
    (last,) = dumped.glob("*-select-kernels.txt")
    graphs = [t[t.index("graph(") :] for t in (capsys.readouterr().out, last.read_text())]
    assert graphs[0].strip() == graphs[1].strip()


def test_ops_of_a_library_are_there_once_its_module_is_imported(
    dumped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_ops.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('own_ops_of_a_test::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor: return x * 2\n"
        "twice.register_fake(torch.empty_like)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "graph.txt"
    file.write_text(
        "dump 1, level captured\ngraph(\n  %arg0: f32[3],\n) {\n"
        "  %0 = own_ops_of_a_test.twice(%arg0) : f32[3]\n  return [%0]\n}\n"
    )
    command = ["opt", str(file), "-p", "canonicalize"]
    assert cli.main(command) == 2
    assert "no op own_ops_of_a_test.twice; if it is of a library, import that" in capsys.readouterr().err
    assert cli.main([*command, "--import", "own_opps"]) == 2
    assert "--import own_opps: No module named" in capsys.readouterr().err
    assert cli.main([*command, "--import", "own_ops"]) == 0
    assert "%0 = own_ops_of_a_test.twice(%arg0) : f32[3]" in capsys.readouterr().out


def test_without_the_contents_of_buffers_less_is_known_and_that_is_said(
    dumped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (dumped / "values.json").unlink()
    assert cli.main(["opt", str(dumped / "00-capture.txt"), "-p", "canonicalize,fuse-attention"]) == 0
    out, err = capsys.readouterr()
    assert "k <= q" not in out
    assert "keep r0[q, k]" in out
    assert "no values.json beside 00-capture.txt" in err


def test_opt_as_json_says_what_the_passes_did(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["opt", str(dumped / "00-capture.txt"), "-p", "canonicalize", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in found["passes"]] == ["canonicalize"]
    assert found["missed"] == []


@pytest.mark.parametrize(
    ("passes", "problem"),
    [
        ("fuse-atention", "did you mean 'fuse-attention'"),
        ("select-kernels", "needs a graph at level fused, this one is at captured"),
        ("canonicalize(", "not closed"),
    ],
)
def test_passes_that_cannot_run_are_told_with_exit_code_two(
    passes: str, problem: str, dumped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["opt", str(dumped / "00-capture.txt"), "-p", passes]) == 2
    out, err = capsys.readouterr()
    assert problem in err and not out


def test_files_that_cannot_be_read_are_told_with_exit_code_two(
    dumped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = dumped / "00-capture.txt"
    for name, content in (("values.json", "{"), ("values.json", '{"$mask": {"dtype": "bool"}}')):
        (dumped / name).write_text(content)
        assert cli.main(["opt", str(capture), "-p", "canonicalize"]) == 2
        assert "values.json is cut off or of another version" in capsys.readouterr().err
    (dumped / "values.json").unlink()
    capture.write_text(capture.read_text()[:-9])
    assert cli.main(["opt", str(capture), "-p", "canonicalize"]) == 2
    assert "00-capture.txt, line" in capsys.readouterr().err
    assert cli.main(["opt", str(tmp_path / "none"), "-p", "canonicalize"]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4).tril(), torch.tensor(3), torch.zeros(0, 5), torch.randn(2, 3).mT,
        torch.randn(7).bfloat16(), torch.tensor([True, False]), torch.arange(5).to(torch.uint8),
    ],
    ids=["triangle", "number", "empty", "transposed", "bfloat16", "bool", "uint8"],
)  # fmt: skip
def test_contents_of_tensors_come_back_as_they_were(tensor: Tensor) -> None:
    found = decode(json.loads(json.dumps(encode(tensor))))
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_contents_are_read_beside_the_text(dumped: Path) -> None:
    graph = read_graph_file(dumped / "00-capture.txt")
    (mask,) = graph.values.values()
    assert torch.equal(mask, Buffered().mask)


# --- bisect ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Doubles:
    """Makes the model answer twice as much."""

    name: str = "doubles"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        out = graph.graph.output_node()
        (value,) = out.args[0]  # type: ignore[misc]
        with graph.graph.inserting_before(out):
            twice = graph.graph.call_function(torch.ops.aten.mul.Tensor, (value, 2))
        twice.meta = dict(value.meta)  # type: ignore[union-attr]
        out.args = ((twice,),)
        return Outcome()


@dataclasses.dataclass(frozen=True)
class Fails(Doubles):
    name: str = "fails"

    def run(self, graph: ProgramGraph) -> Outcome:
        raise KeyError("no")


def test_the_pass_that_changes_the_answer_is_found() -> None:
    passes = (*DEFAULT_PIPELINE[:3], Doubles(), *DEFAULT_PIPELINE[3:])
    found = bisect(Buffered(), torch.randn(2, 7, 8), options=Options(passes=passes))
    assert found.culprit == "doubles"
    assert [s.name for s in found.steps] == [
        "capture",
        "canonicalize",
        "fuse-attention",
        "merge-heads",
        "doubles",
    ]
    assert [s.holds for s in found.steps] == [True] * 4 + [False]
    assert "the first that does not hold is doubles" in str(found)


def test_a_pass_that_fails_is_found_too() -> None:
    passes = (*DEFAULT_PIPELINE[:3], Fails(), *DEFAULT_PIPELINE[3:])
    found = bisect(Buffered(), torch.randn(2, 7, 8), options=Options(passes=passes))
    assert found.culprit == "fails"
    assert "KeyError" in found.steps[-1].failure


@pytest.mark.slow
def test_a_model_that_is_right_has_no_culprit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bisect", TINY, "--tokens", "16", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["culprit"] == ""
    assert [s["name"] for s in found["steps"]] == ["capture", *(p.name for p in DEFAULT_PIPELINE)]
    assert all(s["holds"] for s in found["steps"])
    assert "fuse-attention" in err


@pytest.mark.slow
def test_a_culprit_gives_exit_code_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = (*DEFAULT_PIPELINE[:3], Doubles(), *DEFAULT_PIPELINE[3:])
    monkeypatch.setattr(sys.modules["attngraph.api.options"], "order", lambda *_, **__: passes)
    assert cli.main(["bisect", TINY, "--tokens", "16"]) == 1
    assert "doubles" in capsys.readouterr().out.splitlines()[-1]
