"""`attngraph verify REFERENCE CANDIDATE`: the verdict as text and as data, and an exit code for each."""

import json
from pathlib import Path

import pytest

from attngraph import cli

SIDES = """
import torch
from torch import nn
class Plain(nn.Module):
    def __init__(self, window=4, name="qkv", drawn=0):
        super().__init__()
        torch.randn(drawn)
        self.window, self.name = window, name
        setattr(self, name, nn.Linear(8, 24))
    def forward(self, x):
        q, k, v = getattr(self, self.name)(x).chunk(3, -1)
        i = torch.arange(x.shape[1])
        seen = (i <= i[:, None]) & (i > i[:, None] - self.window)
        return (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
def of_tokens(tokens=9): return Plain(), torch.ones(1, tokens, 8).cumsum(1)
class Two(Plain):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 24)
"""


@pytest.fixture
def sides(tmp_path: Path) -> str:
    """A file of models."""
    (tmp_path / "sides.py").write_text(SIDES)
    return str(tmp_path / "sides.py")


def verdict(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["verify", "--budget", "1", *words])
    return code, capsys.readouterr().out


def test_the_exit_code_is_that_of_the_verdict(sides: str, capsys: pytest.CaptureFixture[str]) -> None:
    reference = f"{sides}:of_tokens"
    assert verdict(capsys, reference, f"{sides}:Plain")[0] == 0
    code, said = verdict(capsys, reference, f"{sides}:Plain(window=5)")
    assert code == 1 and said.startswith("differs: ") and "sides.py:14" in said
    code, said = verdict(capsys, reference, f"{sides}:Two")
    assert code == 2 and said.startswith("cannot be compared: ") and "other" in said


def test_json_is_one_object_of_stable_fields(sides: str, capsys: pytest.CaptureFixture[str]) -> None:
    reference, candidate = f"{sides}:of_tokens", f"{sides}:Plain(window=4096)"
    options = ["--json", "--seed", "3", "--tokens", "6"]
    assert verdict(capsys, reference, candidate, *options, "--batch", "2") == (2, "")  # it takes no batch
    code, said = verdict(capsys, reference, candidate, *options)
    found = json.loads(said)
    assert code == 1 and found["status"] == "differs" and found["seed"] == 3 and found["tried"] >= 1
    assert list(found) == [
        "reference", "candidate", "status", "differences", "attentions", "notes", "tried", "worst", "seed"
    ]  # fmt: skip
    assert found["candidate"] == candidate and found["worst"] > 1
    (program,) = (d for d in found["differences"] if d["kind"] == "program")
    assert "sides.py:14" in program["reference"] and program["program"] != program["other"]
    assert "from 5 tokens on" in program["about"]


def test_names_of_weights_are_read_from_a_file(
    sides: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, target = tmp_path / "names.json", f"{sides}:Plain(name='other',drawn=1)"
    names.write_text('{"other.weight": "qkv.weight", "other.bias": "qkv.bias"}')
    code, said = verdict(capsys, f"{sides}:of_tokens", target, "--rename", str(names))
    assert code == 0 and "2 by name, 0 by value" in said
    names.write_text('["other.weight"]')
    assert cli.main(["verify", f"{sides}:of_tokens", target, "--rename", str(names)]) == 2
    assert "must hold one JSON object of names" in capsys.readouterr().err


KERNELS = """
import os
import torch
from torch import nn
def plain(x, y, scale=3.0): return (x @ y.mT / scale).softmax(-1) @ y
def kernel(x, y): return plain(x, y, 3.1 if x.shape[1] > 4 else 3.0)
def arguments(tokens=7): return {"x": torch.randn(2, tokens, 8), "y": torch.randn(2, 6, 8)}
def number(): return 3
class Hostile(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x * 1.1  # <script>alert(1)</script>
def of_tokens(): return (lambda x: (x @ x.mT).softmax(-1) @ x), torch.randn(1, 5, 8)
"""


def test_functions_are_sides_with_inputs_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    own = str(tmp_path / "kernels.py")
    words = [f"{own}:plain", f"{own}:kernel", "--inputs", f"{own}:arguments"]
    code, said = verdict(capsys, *words, "--json", "--budget", "20")
    difference = json.loads(said)["differences"][0]
    assert code == 1 and difference["code"] == "values" and difference["smallest"][0] == "float32 [1, 5, 8]"
    assert verdict(capsys, f"{own}:plain", f"{own}:plain", "--inputs", f"{own}:arguments")[0] == 0
    for wrong, reason in (
        (words[:2], "--inputs"),
        ([*words[:3], f"{own}:number"], "must return arguments"),
        ([*words, "--batch", "3"], "takes no batch"),
    ):
        assert cli.main(["verify", *wrong]) == 2
        assert reason in capsys.readouterr().err


def test_a_candidate_runs_in_a_process_of_its_own(sides: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{sides}:of_tokens", f"{sides}:Plain(window=5)", "--subprocess", "--memory", "2GiB"]
    code, said = verdict(capsys, *words, "--seconds", "50")
    assert code == 1 and "it runs in a process of its own" in said


def test_the_page_shows_both_sides_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    own, page = str(tmp_path / "kernels.py"), tmp_path / "page.html"
    code, _ = verdict(capsys, f"{own}:of_tokens", f"{own}:Hostile", "--html", str(page))
    text = page.read_text()
    assert code == 1 and "differs" in text and "kernels.py:11" in text
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text
    assert "default-src &#x27;none&#x27;" in text and "What was compared" in text
    assert (
        cli.main(["verify", f"{own}:of_tokens", f"{own}:Hostile", "--html", str(tmp_path / "no" / "x")]) == 2
    )
