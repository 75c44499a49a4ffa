"""The gallery: what its page tells of each variant is what a run finds."""

from __future__ import annotations

import json

import pytest

from workshop.gallery import command

MEASURED = json.loads(command.FILE.read_text("utf-8"))["rows"]
ROWS = {row["cell"]: row for row in MEASURED if row["name"] == "attngraph"}


@pytest.mark.parametrize("name", command.VARIANTS)
def test_a_variant_is_as_the_page_says(name: str) -> None:
    found = command.found_in(name)  # compared with eager there
    assert found == {key: ROWS[name][key] for key in found}, (
        "python -m workshop gallery --write, without its file"
    )


def test_the_pictures_are_those_of_the_file() -> None:
    assert list(ROWS) == list(command.VARIANTS)
    drawn = command.pictures()
    assert {name: (command.DOCS / name).read_text("utf-8") for name in drawn} == drawn
    kept = {f"pictures/gallery/{path.name}" for path in (command.DOCS / "pictures" / "gallery").iterdir()}
    assert kept == set(drawn)
    assert "h1v1h-1z" in drawn["pictures/gallery/causal.svg"]  # the first query sees one key
