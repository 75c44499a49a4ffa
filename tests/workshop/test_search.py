"""The command that searches: it counts programs and wrong ones, and prints those."""

from __future__ import annotations

import pytest

from workshop.__main__ import main
from workshop.fuzz import causal, sizes


def test_programs_and_wrong_ones_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "check", lambda number: "off by 1" if number == 5_000_001 else "")
    assert main(["search", "sizes", "--seed", "5", "--count", "3"]) == 1
    wrong, last = (line for line in capsys.readouterr().out.splitlines())
    assert wrong.startswith("5000001: ") and wrong.endswith("-> off by 1")
    assert last.startswith("search sizes, seed 5: 3 programs (3 functions), 1 wrong, ")
    assert main(["search", "sizes", "--seed", "5", "--count", "1"]) == 0


def test_an_error_of_the_check_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(seed: int) -> tuple[str, bool]:
        raise KeyError(seed)

    monkeypatch.setattr(causal, "check", fails)
    assert main(["search", "causal", "--count", "1"]) == 1
    assert "KeyError: 0" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["around", "rows", pytest.param("files", marks=pytest.mark.slow)])
def test_a_short_search_finds_nothing(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", kind, "--count", "2"]) == 0
    assert f"search {kind}, seed 0: 2 programs" in capsys.readouterr().out
