"""`attngraph show`: what it prints, and what it says where it cannot."""

from __future__ import annotations

import io
import json
import os
import stat
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from attngraph import cli
from attngraph.report.programs import WELL_KNOWN


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["show", *arguments]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["show", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("attngraph: ")
    return err


def test_a_program_is_shown_normalised_in_words_as_a_picture_and_in_operations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(capsys, "s=.5*dot;keep k<=q", "--queries", "128")
    assert "  | s = 0.5 * dot\n  | keep k <= q\n" in out
    assert "mask    causal" in out
    assert "25.0% full, 50.0% partial, 25.0% empty" in out
    assert "computed: 3.15 MFLOP of 4.19 MFLOP (1 head of width 64, 256 for a pair), 75.0%" in out
    assert "24 queries and 24 keys, pair by pair" in out and "128 queries and 128 keys, by tiles" in out


def test_keys_are_as_many_as_queries_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert "9 queries and 9 keys" in shown(capsys, "causal", "--keys", "9")
    assert "5 queries and 5 keys" in shown(capsys, "causal", "--queries", "5")
    assert "5 queries and 9 keys" in shown(capsys, "causal", "--queries", "5", "--keys", "9")


def test_what_only_a_run_decides_is_a_range(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "keep k <= q and r0[b, k]", "--queries", "128")
    assert "75.0% unknown" in out and "0.0% to 75.0%" in out and "decided by r0" in out
    out = shown(capsys, "causal-fill", "--queries", "128")
    assert "25.0% filled" in out and "underflow" in out and "75.0% to 100.0%" in out


@pytest.mark.parametrize("name", sorted(WELL_KNOWN))
def test_every_well_known_program_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, name, "--queries", "256")
    assert out.startswith(WELL_KNOWN[name].about)


def test_sizes_are_those_of_the_program_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert "n0      256" in shown(capsys, "window")
    out = shown(capsys, "window", "--size", "n0=64", "--queries", "128")
    assert "n0      64" in out and "with n0" not in out
    found = json.loads(shown(capsys, "window-global", "--size", "n1=3", "--json"))
    assert found["sizes"] == [128, 3] == found["pairs"]["sizes"]


def test_json_has_the_rows_the_shares_and_the_operations(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        shown(capsys, "keep k <= q + h", "--queries", "8", "--tile", "4", "--head", "0", "4", "--json")
    )
    assert found["program"] == "keep k <= q + h" and found["mask"]
    assert found["legend"]["#"] == "full"
    assert [h["heads"] for h in found["tiles"]["heads"]] == [[0], [4]]
    assert found["tiles"]["heads"][0]["rows"] == ["+.", "#+"]
    assert found["pairs"]["heads"][0]["rows"][0] == "#......."
    assert found["operations"] == {
        "head_width": 64,
        "all": 32768,
        "least": 24576 + 4096,
        "most": 24576 + 4096,
    }


def test_a_program_comes_from_a_file_or_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.score"
    file.write_text("# mine\nkeep k <= q\n")
    assert "mask    causal" in shown(capsys, str(file))
    monkeypatch.setattr("sys.stdin", io.StringIO("keep k < 3"))
    assert "k < 3" in shown(capsys, "-", "--queries", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["casual"],
            "'casual' is no score program, no file, and no well-known program; did you mean 'causal'?",
        ),
        (["zzz"], "there are full, causal,"),
        (["keep k <= qq"], "did you mean `q`?\n  keep k <= qq\n            ^"),
        (["keep k < n0"], "the program names n0; say what it is: --size n0=128"),
        (["window", "--size", "n1=4"], "--size n1 is given, but the program names n0."),
        (["causal", "--size", "n0=4"], "the program names no size."),
        (["window", "--size", "256"], "--size takes n0=128 and the like, found '256'."),
        (["causal", "--queries", "-3"], "queries must be at least 1"),
        (["causal", "--queries", "0"], "queries must be at least 1"),
        (["causal", "--tile", "0"], "tile must be at least 1"),
        (["causal", "--head", "-1"], "--head counts from 0"),
        (["causal", "--queries", "1000000", "--tile", "8"], "make the tile larger"),
        (["keep 1 % 0 == k"], "the program has no value here: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"cannot read {tmp_path}: Is a directory" in refused(capsys, str(tmp_path))
    binary = tmp_path / "weights"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "it is not text in UTF-8" in refused(capsys, str(binary))


def test_an_svg_is_written_whole_with_the_usual_rights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mask.svg"
    shown(capsys, "strided", "--svg", str(file))
    assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert [p.name for p in tmp_path.iterdir()] == ["mask.svg"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_file_that_cannot_be_written_is_named_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot write" in refused(capsys, "causal", "--svg", str(tmp_path / "none" / "mask.svg"))
    assert "Is a directory" in refused(capsys, "causal", "--svg", str(tmp_path))
    file = tmp_path / "mask.svg"
    file.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in refused(capsys, "causal", "--svg", str(file))
    assert file.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["mask.svg"]


def test_the_command_lists_the_programs_that_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["show", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in WELL_KNOWN)
