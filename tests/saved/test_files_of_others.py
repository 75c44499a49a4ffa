"""A saved folder of somebody else, edited and signed anew, is refused in plain words or harmless: nothing of
it is executed, and nothing outside of it is read."""

from __future__ import annotations

import base64
import json
import os
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attngraph
from attngraph.errors import PlacementError, SavedError
from attngraph.saved import folder
from attngraph.saved.disk import as_artifact, from_artifact
from attngraph.saved.folder import read_file, read_manifest, write_folder

Models = Callable[..., types.ModuleType]
IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])
Sign = Callable[..., None]


def signed(path: Path, about: Any = None, **files: Callable[[bytes], bytes]) -> None:
    """Edit files (`graph_txt` is graph-0/graph.txt) and what the manifest says, and sign them anew."""
    said = read_manifest(path)
    contents = {name: read_file(path, said, name) for name in said["files"]}
    for name, change in files.items():
        place = f"graph-0/{name.replace('_', '.')}"
        contents[place] = change(contents[place])
    listed = {key: value for key, value in said.items() if key not in ("files", "format")}
    write_folder(path, {**listed, **(about or {})}, contents, replace=True)


def with_line(line: str) -> Callable[[bytes], bytes]:
    """One more value in the text of the graph."""

    def change(data: bytes) -> bytes:
        head, _, rest = data.decode().rpartition("  return ")
        return f"{head}  %999 = {line} : f32[4]\n  return {rest}".encode()

    return change


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("load_library.__self__.load_library('/x.so')", "there is no op"),
        ("from_file('/tmp/written', True, 16)", "from_file is not on the list"),
        ("aten.from_file('/tmp/written', True, 16)", "aten.from_file"),
        ("_print('text')", "_print is not on the list"),
        ("set(%0, %0)", "set is not on the list"),
        ("resize(%0, [1000000])", "resize is not on the list"),
        ("add_(%0, %0)", "add_ is not on the list"),
        ("add.__class__(%0)", "no form of add"),
        ("add.out(%0, %0, out=%0)", "writes to its operands"),
        ("_scaled_dot_product_flash_attention_for_cpu(%0, %0, %0)", "is not on the list"),
        ("attngraph.all_reduce(%0, '0')", "talks to other processes"),
        ("attngraph.load_library(%0)", "there is no op"),
        ("quantized.linear_prepack(%0)", "is not on the list"),
        ("prims.empty([4])", "is not on the list"),
        ("__import__.os(%0)", "there is no op"),
        ("add(%0, 9**9**9)", "more than 64 bits|larger than 64"),
        ("add(%0, ((2**60)**60)**60)", "powers of powers"),
        (f"add(%0, {'(' * 300}1{')' * 300})", "too long"),
    ],
)  # fmt: skip
def test_what_a_graph_names_is_looked_up_in_a_list(saved: Path, line: str, problem: str) -> None:
    signed(saved, graph_txt=with_line(line))
    with pytest.raises(SavedError, match=problem):
        attngraph.load(saved)(IDS)


def test_an_unharmed_folder_is_used_when_it_is_signed_anew(saved: Path) -> None:
    before = attngraph.load(saved)(IDS)
    signed(saved, graph_txt=with_line("add(%0, 1.0)"))
    assert torch.equal(attngraph.load(saved)(IDS), before)


def with_entry(path: Path, name: str, entry: Any) -> None:
    said = read_manifest(path)
    content = {**said, "files": {**said["files"], name: entry}}
    digest = folder.hashlib.sha256(folder.as_bytes(content)).hexdigest()
    (path / folder.MANIFEST).write_bytes(folder.as_bytes({"content": content, "digest": digest}))


NAMES = (
    "/dev/zero", "../secret", "graph-0/../../secret", "a/b/c", "", ".", "..", "a\n", "manifest.json", "~",
    "a\0b",
)  # fmt: skip
SIZES = ([-1, ""], [1 << 40, ""], ["5", ""], [5.0, ""], [5], None, {}, [True, 5])


@pytest.mark.parametrize(
    ("name", "entry", "problem"),
    [(name, [5, "0" * 64], "which is no file of a saved model") for name in NAMES]
    + [("more", entry, "no size and digest") for entry in SIZES],
)
def test_only_names_inside_of_the_folder_and_sizes_that_are_possible_are_read(
    saved: Path, name: str, entry: Any, problem: str
) -> None:
    with_entry(saved, name, entry)
    with pytest.raises(SavedError, match=problem):
        attngraph.load(saved)


def test_only_plain_files_of_their_length_are_read(saved: Path, tmp_path: Path) -> None:
    manifest = (saved / folder.MANIFEST).read_bytes()
    with_entry(saved, "more", [5, "0" * 64])
    os.mkfifo(saved / "more")
    with pytest.raises(SavedError, match="no plain file"):
        attngraph.load(saved)  # and does not wait for somebody to write to it
    (saved / "more").unlink()
    (tmp_path / "secret").write_text("12345")
    (saved / "more").symlink_to(tmp_path / "secret")
    with pytest.raises(SavedError, match="more is a link"):
        attngraph.load(saved)
    (saved / "more").unlink()
    (saved / "more").mkdir()
    with pytest.raises(SavedError, match="more"):
        attngraph.load(saved)
    (saved / folder.MANIFEST).write_bytes(manifest)
    with open(saved / "graph-0" / "graph.txt", "ab") as file:
        file.truncate(1 << 36)  # of no blocks: reading it would take all memory
    with pytest.raises(SavedError, match=r"graph\.txt has changed"):
        attngraph.load(saved)
    (saved / "graph-0").rename(tmp_path / "elsewhere")
    (saved / "graph-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SavedError, match="graph-0 is a link"):
        attngraph.load(saved)


@pytest.mark.parametrize(
    "about",
    [
        {"options": {"backend": "auto"}}, {"options": None}, {"options": {"dump": "/tmp/x"}},
        {"kind": "other"}, {"kind": "decoder"}, {"graphs": 10**9}, {"graphs": -1}, {"graphs": "1"},
        {"versions": 3}, {"config": {"page": "x"}}, {"model": None},
        {"options": {"backend": "none", "inductor": False, "strict": False, "absorb": "auto", "disable": [],
                     "passes": []}},
        {"options": {"backend": "auto", "inductor": "yes", "strict": False, "absorb": "auto", "disable": [],
                     "passes": []}},
        {"options": {"backend": "auto", "inductor": False, "strict": False, "absorb": "auto",
                     "disable": ["x"], "passes": []}},
        {"weights": {"a": {}}}, {"weights": 5}, {"signature": [["a", "no kind", True]]}, {"training": "no"},
        {"weights": {"forward": {"same": "embed.weight", "parameter": True, "gradient": True}}},
    ],
)  # fmt: skip
def test_what_a_manifest_says_is_checked(saved: Path, about: dict[str, Any]) -> None:
    signed(saved, about)
    with pytest.raises(SavedError):
        attngraph.load(saved)(IDS)


def changed_json(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        found = json.loads(data)
        change(found)
        return json.dumps(found).encode()

    return changed


def test_a_constant_is_unpacked_to_what_its_shape_says(saved: Path) -> None:
    packed = base64.b64encode(zlib.compress(bytes(1 << 24))).decode()
    for shape, problem in (([4], "are not the 16 bytes"), ([1 << 40], "no tensor"), ([-1], "no tensor")):
        constant = {"dtype": "f32", "shape": shape, "data": packed}
        signed(saved, graph_json=changed_json(lambda g, c=constant: g["constants"].update(c=c)))
        with pytest.raises(SavedError, match=problem):
            attngraph.load(saved)(IDS)


@pytest.mark.parametrize("name", ["forward", "training", "_parameters", "__class__", "not a name", "embed"])
def test_a_graph_sets_no_attribute_that_every_module_has(saved: Path, name: str, models: Models) -> None:
    entry = ["model", name, name, None, False]
    signed(saved, graph_json=changed_json(lambda g: g["attributes"].append(entry)))
    with pytest.raises(SavedError, match="is not set by any forward"):
        attngraph.load(saved)(IDS)


def test_files_that_are_no_json_or_lack_parts_are_told(saved: Path) -> None:
    for name in ("graph_json", "guards_json", "report_json"):
        for data in (b"", b"[" * 100_000, b"{}", b"null", b"[1]", b"\xff", b'{"call": 1}'):
            signed(saved, **{name: lambda _, d=data: d})
            with pytest.raises(SavedError):
                attngraph.load(saved)(IDS)


@pytest.mark.parametrize(
    "named",
    [b"[", b"[" * 100_000, b"5", b"{\"a\": -1}", b"{\"a\": 3}", b"{\"a\": \"3\"}", b"{\"a\": 1.0}", b"{}",
     b"{\"../a\": 2}", b"{\"manifest.json\": 2}"],
)  # fmt: skip
def test_an_artifact_says_which_files_it_has(named: bytes) -> None:
    body = named + b"\nab"
    with pytest.raises(SavedError):
        from_artifact(folder.hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert from_artifact(as_artifact({"a": b"1", "b": b"23"})) == {"a": b"1", "b": b"23"}


def test_weights_in_several_files_lie_beside_their_index(tmp_path: Path) -> None:
    index = {"weight_map": {"weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PlacementError, match="which is no file beside it"):
        attngraph.load_weights(torch.nn.Linear(2, 2), tmp_path)
