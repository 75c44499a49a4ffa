"""Reasons as data: every reason of the code has a kind, every kind is given by the code, and the commands
that tell them find edits that are right, and only such."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attngraph
from attngraph.cli import main
from attngraph.reasons import IN_PIECES, KINDS, OTHER, kind_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "when-it-will-not-fuse.md").read_text("utf-8")


def strings() -> list[str]:
    """Every text in the code that makes reasons, with {} where a value is put in."""
    found = []
    for path in (p for room in ("attngraph", "passes") for p in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if path.name != "reasons.py" else ():
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(getattr(v, "value", "{}")) for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_reason_that_the_page_tells_of_has_a_kind() -> None:
    rows = re.findall(r"^\| (.*?) \| .* \|$", PAGE.partition("<!-- codes -->")[0], re.MULTILINE)
    told = [text for row in rows for text in row.split("<br>") if text != "reason"]
    assert len(told) > 50
    assert [text for text in told if kind_of(text) is OTHER] == []


def test_no_word_of_a_kind_has_gone_from_the_code() -> None:
    texts = strings()
    gone = [w for kind in KINDS for w in kind.words if not any(w in text for text in texts)]
    assert gone == []


def test_codes_differ() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x @ x.mT
        p = s.softmax(-1)
        return (p @ x).mean() - p.square().mean() + s.softmax(-2).amax()


def test_places_of_a_report_have_codes_lines_and_modules_and_errors_their_kind() -> None:
    places = attngraph.explain(nn.Sequential(Model()), torch.randn(2, 5, 4)).places
    assert {p.code for p in places} == {"used-elsewhere", "no-attention"}
    assert all(p.place.startswith("tests/test_reasons.py:") and p.modules == ("0",) for p in places)
    assert all(p.change == kind_of(p.reason).change and p.reason for p in places)
    with pytest.raises(attngraph.NoDecoderError) as caught:
        attngraph.compile(Model().eval(), cache=True).prefill(torch.zeros(1, 5, 4))
    assert caught.value.kind.code != OTHER.code


def test_where_capture_stopped_is_a_place_too() -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) @ x.mT if x.sum() > 0 else x

    report = attngraph.CompileReport(breaks=attngraph.explain(branching, torch.ones(3, 3)).breaks)
    assert [p.code for p in report.places] == ["values-decide"]
    other = attngraph.CompileReport.from_json(report.to_json().replace("depends on the values", "does"))
    assert [p.code for p in other.places] == [IN_PIECES.code]


MODELS = """
import torch
from torch import nn
x = torch.randn(2, 5, 4)
class Clamped(nn.Module):
    def forward(self, x):
        e = torch.exp(x @ x.mT)
        return (e @ x) / e.sum(-1, keepdim=True).clamp(min=1e-6)
class Distances(nn.Module):
    def forward(self, x):
        d = ((x[:, :, None] - x.unsqueeze(1)) ** 2).sum(-1)
        return torch.softmax(-d, -1) @ x
class Cdist(nn.Module):
    def forward(self, x):
        return torch.softmax(-torch.cdist(x, 2 * x).square(), -1) @ x
class Loud(nn.Module):
    def forward(self, x):
        print("in forward")
        return torch.softmax(x @ x.mT, -1) @ x
class Weighty(nn.Module):
    def forward(self, x):
        s = x @ x.mT
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return (e / (e.sum(-1, keepdim=True) + 0.009)) @ x
class Joined(nn.Module):
    def forward(self, x):
        p = torch.softmax(x @ x.mT, -1)
        return (p @ x).mean() - p.square().mean()
def of(kind): return lambda: (kind(), x)
clamped, distances, cdist, loud, weighty, joined = map(
    of, (Clamped, Distances, Cdist, Loud, Weighty, Joined))
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS, "utf-8")
    return tmp_path


def advised(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["advise", f"models.py:{name}", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("name", "line", "most"),
    [
        ("clamped", "        return (e @ x) / e.sum(-1, keepdim=True)", 0),
        ("distances", "        d = ((x * x).sum(-1)[..., :, None] - 2 * (x @ x.mT)", 1e-12),
        (
            "cdist",
            "        return torch.softmax(-((x * x).sum(-1)[..., :, None] - 2 * (x @ (2 * x).mT)",
            1e-12,
        ),
        ("loud", "        pass", 0),
    ],
)
def test_a_patch_makes_the_place_fuse_and_keeps_the_results(
    name: str, line: str, most: float, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advised(name, capsys)
    assert [p["patched"] for p in found["places"]] == [True]
    assert found["places"][0]["difference"] <= most
    assert any(row.startswith("+" + line) for row in found["patch"].splitlines()), found["patch"]
    assert (models / "models.py").read_text("utf-8") == MODELS  # nothing was written
    subprocess.run(["git", "apply", "-"], input=found["patch"], text=True, cwd=models, check=True)
    after = advised(name, capsys)
    assert (after["places"], after["patch"], len(after["attention"])) == ([], "", 1)


@pytest.mark.parametrize("name", ["weighty", "joined"])
def test_what_changes_results_or_is_no_mechanical_edit_is_told_without_a_patch(
    name: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advised(name, capsys)
    assert [p["patched"] for p in found["places"]] == [False]
    assert found["patch"] == "" and found["places"][0]["change"]
    assert main(["explain", f"models.py:{name}"]) == 0
    assert f"change: {found['places'][0]['change']}" in capsys.readouterr().out


def test_the_page_shows_what_advise_prints() -> None:
    shown = re.search(r"^\$ attngraph (advise \S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    done = subprocess.run(
        [sys.executable, "-m", "attngraph", *shown[1].split()],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert [re.sub(r"\de-\d+ of", "? of", t).strip() for t in (done.stdout, shown[2])] == [
        re.sub(r"\de-\d+ of", "? of", shown[2]).strip()
    ] * 2
