"""The tables of docs/gpu.md are those of the files in docs/measured."""

from __future__ import annotations

import pytest

from workshop import tables
from workshop.__main__ import main


def test_the_page_has_every_table_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.written(page) == page, "run python -m workshop tables --write"
    assert tables.names(page) == list(tables.TABLES)
    assert main(["tables"]) == 0
    assert all(make() in capsys.readouterr().out or make() in page for make in tables.TABLES.values())


def test_a_figure_that_was_changed_by_hand_is_noticed() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert (
        tables.written(page.replace("| 0.534 |", "| 0.234 |"))
        == page
        != page.replace("| 0.534 |", "| 0.234 |")
    )
