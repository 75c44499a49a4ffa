"""Dumps: the graph before and after fusing reads as written down in `golden/`, two compilations give the
same text, and no path of this machine is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import attngraph
from attngraph.passes import DEFAULT_PIPELINE
from attngraph.testing import without_what_varies

Make = Callable[[], nn.Module]


def dumped(make_model: Make, folder: Path) -> dict[str, str]:
    """The text of each dump of one compilation, by the file's name."""
    compiled = attngraph.compile(make_model(), dump=folder)
    with torch.no_grad():
        compiled(torch.randn(2, 7, 32))
    return {p.name: p.read_text() for p in sorted((folder / "graph-0").glob("*.txt"))}


OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


@pytest.mark.skipif(OLDER, reason="before torch 2.15 dropout in eval is captured as a copy")
@pytest.mark.parametrize("stage", ["canonicalize", "fuse-attention", "select-kernels"])
def test_the_graph_of_causal_attention_reads_as_written_down(
    stage: str, make_model: Make, tmp_path: Path, golden: Callable[..., None]
) -> None:
    texts = dumped(make_model, tmp_path)
    (name,) = [n for n in texts if stage in n]
    golden(f"causal-{stage}.txt", without_what_varies(texts[name]))


def test_two_compilations_are_the_same_text(make_model: Make, tmp_path: Path) -> None:
    assert dumped(make_model, tmp_path / "a") == dumped(make_model, tmp_path / "b")


def test_each_graph_is_dumped_in_a_folder_of_its_own(make_model: Make, tmp_path: Path) -> None:
    compiled = attngraph.compile(make_model(), dump=tmp_path)
    x = torch.randn(2, 7, 32)
    compiled(x)
    with torch.no_grad():
        compiled(x)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph-0", "graph-1"]


def test_no_dump_holds_a_path_of_this_machine_or_an_address(make_model: Make, tmp_path: Path) -> None:
    for name, text in dumped(make_model, tmp_path).items():
        assert str(Path.home()) not in text, name
        assert str(tmp_path) not in text, name
        assert not re.search(r"(^|[\s(\"'])/[\w.-]+/", text), name
        assert "0x" not in text, name


def test_a_dump_starts_with_its_pass_and_tells_levels_and_numbers_of_ops(
    make_model: Make, tmp_path: Path
) -> None:
    texts = dumped(make_model, tmp_path)
    (name,) = [n for n in texts if "fuse-attention" in n]
    head = texts[name].splitlines()
    number = name.split("-")[0]
    assert re.fullmatch(rf"# {number} fuse-attention   canonical -> fused   \d+ -> \d+ ops", head[0])
    assert any(line.startswith("# fused 1") for line in head)
    assert any("keep k <= q" in line for line in head)


def test_the_index_has_the_timings_of_every_pass(make_model: Make, tmp_path: Path) -> None:
    dumped(make_model, tmp_path)
    index = json.loads((tmp_path / "graph-0" / "index.json").read_text())
    assert [e["name"] for e in index] == [step.name for step in DEFAULT_PIPELINE]
    assert all(e["seconds"] >= 0 for e in index)


def test_the_environment_asks_for_dumps_too(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGRAPH_DUMP", str(tmp_path / "here"))
    attngraph.compile(make_model())(torch.randn(2, 7, 32))
    assert (tmp_path / "here" / "graph-0" / "00-capture.txt").exists()


def test_a_pass_that_changes_nothing_is_not_dumped(tmp_path: Path) -> None:
    compiled = attngraph.compile(nn.Linear(4, 4), dump=tmp_path)
    compiled(torch.randn(2, 4))
    assert not list((tmp_path / "graph-0").glob("*fuse-attention*"))
