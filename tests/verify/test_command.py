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
    code = cli.main(["verify", *words, "--budget", "1"])
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
