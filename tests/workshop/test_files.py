"""Edited and newly signed files are refused or harmless: a sample; `python -m workshop search files` runs
thousands."""

from __future__ import annotations

import json
import random

import pytest

from workshop.fuzz.files import edits
from workshop.fuzz.files.run import FAULTS, tried


@pytest.mark.parametrize("only", ["module", "paged", pytest.param("dump", marks=pytest.mark.slow)])
def test_edited_files_are_refused_or_harmless(only: str) -> None:
    with tried(only) as one:
        found = [one(3, number) for number in range(24)]
    assert not [each for each in found if each[1] in FAULTS]
    assert {"refused", "equal"} <= {outcome for _, outcome, _ in found}
    assert all(only in kind for kind, *_ in found)


def test_an_edit_is_the_same_each_time_and_changes_something() -> None:
    lines = "graph(\n  %arg0: f32[2],\n) {\n  %0 = add(%arg0, 1.0) : f32[2]\n  return [%0]\n}"
    made = [edits.text(random.Random(n), lines) for n in range(200)]
    assert made == [edits.text(random.Random(n), lines) for n in range(200)]
    assert sum(text != lines for text in made) > 150
    assert any("load_library" in text for text in made)
    tree = {"a": [1, "two", {"b": None}]}
    changed = [edits.tree(random.Random(n), json.loads(json.dumps(tree))) for n in range(50)]
    assert sum(one != tree for one in changed) > 40
