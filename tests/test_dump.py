"""A dump is read back as it was written; what is wrong with one is said, and nothing is written over."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.errors import DumpError
from attngraph.report.dump import Dump, read_dump
from attngraph.report.report import CompileReport


def attend(x: Tensor) -> Tensor:
    keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return (x @ x.mT).masked_fill(~keep, float("-inf")).softmax(-1) @ x


def compiled(folder: Path) -> CompileReport:
    made = attngraph.compile(attend, dump=folder)
    made(torch.randn(2, 7, 8))
    return made.report


def as_compiled(report: CompileReport) -> CompileReport:
    """The report without what is known after the first call: its time, and what kernels remarked, such as
    that they were compiled to C."""
    entries = (
        dataclasses.replace(entry, kernel=dataclasses.replace(entry.kernel, remarks=()))
        for entry in report.attention
    )
    return dataclasses.replace(report, attention=tuple(entries), waited=0.0)


def test_what_was_written_is_read_back_with_all_texts(tmp_path: Path) -> None:
    report = compiled(tmp_path)
    (found,) = read_dump(tmp_path)
    assert found == as_compiled(report)
    assert found.captured.startswith("graph(")
    assert "attention(" in next(p.text for p in found.passes if p.name == "fuse-attention")
    assert read_dump(tmp_path / "graph-0") == (found,)


def test_each_graph_of_a_model_has_its_report(tmp_path: Path) -> None:
    made = attngraph.compile(attend, dump=tmp_path)
    made(torch.randn(2, 7, 8))
    made(torch.randn(2, 7, 8, dtype=torch.float64))
    first, second = read_dump(tmp_path)
    assert first.attention[0].call != second.attention[0].call


def test_a_decoder_has_one_folder_with_all_its_passes(tmp_path: Path) -> None:
    from attngraph.models.targets import tiny_decoder_lm

    model, (ids,) = tiny_decoder_lm(tokens=8)
    decoder = attngraph.compile(model, cache=True, dump=tmp_path)
    decoder.prefill(ids)
    (found,) = read_dump(tmp_path)
    assert [p.name for p in found.passes] == [p.name for p in decoder.report.passes]
    assert found.cache == decoder.report.cache is not None
    assert "cached_attention(" in next(p.text for p in found.passes if p.name == "insert-kv-cache")


def test_an_attempt_that_was_not_kept_leaves_no_folder(tmp_path: Path) -> None:
    dump = Dump(tmp_path)
    dump.stage("capture", "captured", [], "dump 1, level captured", "graph(")
    dump.discard()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_dump_is_told_so(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DumpError, match="there is no dump in"):
            read_dump(place)


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"attention": 3}', '{"attention": [], "new": 1}', ""])
def test_a_report_that_is_cut_or_of_another_version_is_told(tmp_path: Path, content: str) -> None:
    compiled(tmp_path)
    (tmp_path / "graph-0" / "report.json").write_text(content)
    with pytest.raises(DumpError, match=r"report\.json is cut off or of another version"):
        read_dump(tmp_path)


def test_a_graph_that_is_lost_is_named(tmp_path: Path) -> None:
    compiled(tmp_path)
    next((tmp_path / "graph-0").glob("*fuse-attention.txt")).unlink()
    with pytest.raises(DumpError, match="lacks the graph after fuse-attention"):
        read_dump(tmp_path)


def test_no_file_outside_the_folder_is_read(tmp_path: Path) -> None:
    compiled(tmp_path)
    path = tmp_path / "graph-0" / "report.json"
    data = json.loads(path.read_text())
    data["attention"][0]["kernel"]["file"] = "../secret"
    (tmp_path / "secret").write_text("secret")
    path.write_text(json.dumps(data))
    with pytest.raises(DumpError, match="lacks secret"):
        read_dump(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DumpError, match="cannot write a dump to"):
        compiled(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_a_model_in_pieces_says_in_its_dump_why(tmp_path: Path) -> None:
    def depends_on_data(x: Tensor) -> Tensor:
        y = attend(x)
        return y * 2 if float(y.sum()) > 1e9 else attend(y)

    made = attngraph.compile(depends_on_data, dump=tmp_path)
    made(torch.randn(2, 7, 8))
    first, *others = read_dump(tmp_path)
    assert others
    assert first.breaks == made.report.breaks != ()
    (tmp_path / "breaks-0.json").write_text("[3]")
    with pytest.raises(DumpError, match=r"breaks-0\.json is cut off"):
        read_dump(tmp_path)
