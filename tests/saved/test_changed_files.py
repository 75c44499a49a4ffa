"""No file that was changed, cut short or taken away is used."""

from __future__ import annotations

import json
import random
import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attngraph
from attngraph.errors import SavedError
from attngraph.saved import folder
from attngraph.saved.folder import read_file, read_manifest, write_folder

Models = Callable[..., types.ModuleType]
IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])


def test_changed_files_and_those_of_other_versions_are_all_noticed(
    models: Models, saved: Path, tmp_path: Path
) -> None:
    """In turn: one bit flipped, cut short, and folders that another version of something has written."""
    model, path = models().Model().eval(), saved
    about = read_manifest(path)
    contents = {name: read_file(path, about, name) for name in about["files"]}
    listed = {key: value for key, value in about.items() if key not in ("files", "format")}
    files = sorted(p for p in path.rglob("*") if p.is_file())
    rng = random.Random(0)
    for number in range(150):
        if number % 3 == 2:
            name = rng.choice(sorted(about["versions"]))
            versions = {**about["versions"], name: f"{about['versions'][name]}.{number}"}
            write_folder(tmp_path / "other", {**listed, "versions": versions}, contents, replace=True)
            with pytest.raises(SavedError, match=rf"{re.escape(name)} was .*\.{number}, and is"):
                attngraph.load(tmp_path / "other", model, strict=True)(IDS)
            continue
        file = rng.choice(files)
        data = file.read_bytes()
        place = rng.randrange(len(data))
        flipped = bytes([*data[:place], data[place] ^ 1 << rng.randrange(8), *data[place + 1 :]])
        file.write_bytes(data[:place] if number % 3 else flipped)
        with pytest.raises(SavedError, match=r"has changed since it was written|cut off|cut short"):
            attngraph.load(path, model)
        file.write_bytes(data)
    attngraph.load(path, model, strict=True)(IDS)


def test_files_that_are_cut_short_longer_or_gone_are_noticed(models: Models, saved: Path) -> None:
    model, path = models().Model().eval(), saved
    rng = random.Random(1)
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        data = file.read_bytes()
        for changed in (b"", data[: rng.randrange(len(data))], data[:-1], data + b"\n", data + data):
            file.write_bytes(changed)
            with pytest.raises(SavedError, match=file.name):
                attngraph.load(path, model)
        file.unlink()
        with pytest.raises(SavedError, match=file.name):
            attngraph.load(path, model)
        file.write_bytes(data)


def test_another_format_is_named(models: Models, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = models().Model().eval(), saved
    monkeypatch.setattr(folder, "FORMAT", folder.FORMAT + 1)
    with pytest.raises(SavedError, match=r"has the format \d; this version of attngraph reads \d"):
        attngraph.load(path, model)


def test_files_that_do_not_go_together_are_refused(models: Models, saved: Path, tmp_path: Path) -> None:
    """A manifest that fits files which attngraph did not write: nothing is made of them, or executed."""
    model, path = models().Model().eval(), saved
    about = read_manifest(path)
    files = {name: read_file(path, about, name) for name in about["files"]}
    text = files["graph-0/graph.txt"].decode()
    beside = json.loads(files["graph-0/graph.json"])
    beside["parts"]["graph"]["inputs"].pop()
    wrong = {
        "graph-0/graph.txt": [text.replace("linear(", "no_such_op("), text[: len(text) // 2], ""],
        "graph-0/graph.json": [json.dumps(beside), "{}", "[]", "3"],
        "graph-0/report.json": ["{}", json.dumps({"attention": 3})],
    }  # fmt: skip
    for name, texts in wrong.items():
        for number, changed in enumerate(texts):
            other = tmp_path / f"{Path(name).stem}{number}"
            listed = {k: v for k, v in about.items() if k not in ("files", "format")}
            write_folder(other, listed, {**files, name: changed.encode()}, replace=True)
            with pytest.raises(SavedError):
                attngraph.load(other, model, strict=True)(IDS)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "m", {"kind": "a"}, {"one": b"1"}, replace=True)
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if self.name == "two":
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SavedError, match="No space left"):
        write_folder(tmp_path / "m", {"kind": "b"}, {"one": b"2", "two": b"2"}, replace=True)
    assert read_manifest(tmp_path / "m")["kind"] == "a"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
