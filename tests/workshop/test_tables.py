"""The tables of the pages are those of the files in docs/measured."""

from __future__ import annotations

import pytest

from workshop import tables
from workshop.__main__ import main


def test_the_pages_have_every_table_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    assert [tables.written(page) for page in pages] == pages, "run python -m workshop tables --write"
    assert [name for page in pages for name in tables.names(page)] == list(tables.TABLES)
    assert main(["tables"]) == 0
    printed = capsys.readouterr().out
    assert all(make() in printed for make in tables.TABLES.values())


def test_a_figure_that_was_changed_by_hand_is_noticed() -> None:
    page = tables.PAGES[0].read_text(encoding="utf-8")
    assert (
        tables.written(page.replace("| 0.534 |", "| 0.234 |"))
        == page
        != page.replace("| 0.534 |", "| 0.234 |")
    )
