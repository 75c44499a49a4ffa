"""Mutants: what is changed, that one is found after its code has moved, and that a copy which holds them all
runs as before until one is on."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workshop.mutants import copies
from workshop.mutants.command import verdicts
from workshop.mutants.places import Mutant, changed, drawn, found, places

KINDS = (
    ("a < b", "a <= b"), ("a and b", "a or b"), ("not a", "a"), ("True", "False"), ("3", "4"),
    ("a + b", "a - b"), ("return a", "return None"), ("return None", None), ("f(a)", "None"),
    ("f'{a}' + b", None), ("a < b < c", None),
)  # fmt: skip


@pytest.mark.parametrize(("text", "instead"), KINDS)
def test_an_expression_is_changed_a_little(text: str, instead: str | None) -> None:
    (node,) = ast.parse(text).body
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
        other = changed(node.value)
    else:
        other = changed(node)
    assert (other and ast.unparse(other)) == instead


SOURCE = '''"""Not a word of this is changed."""
def between(low, x, high=1):
    """Nor 1 of this."""
    match x:
        case 7:
            raise ValueError(f"{x + 1}" + "no")
    return (
        x > low
        and x < high
    )

class Sum:
    def of(self, xs):
        total = 0
        for x in xs:
            total = total + x
        return total, len(xs)
'''

Write = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Write:
    """Writes files by name, and what each tree has."""

    def write(**files: str) -> Path:
        for folder in ("attngraph/meaning", "attngraph/runtime", "passes", "codegen", "tests"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")  # it is the root, whatever stands above
        (tmp_path / "passes/__init__.py").touch()
        (tmp_path / "attngraph/__init__.py").write_text('"""import words"""\nimport os\n')
        for name, text in files.items():
            (tmp_path / f"{name.replace('__', '/')}.py").write_text(text)
        return tmp_path

    return write


def test_mutants_are_drawn_by_seed_and_found_where_their_code_is(tree: Write) -> None:
    top = tree(passes__sums=SOURCE)
    every = [p.mutant for p in places(top, "passes/sums.py")]
    assert [m.text for m in every if m.function == "between"] == [
        "return x > low and x < high", "x > low and x < high", "x > low", "x < high",
    ]  # fmt: skip
    assert drawn(top, 3, 4) == drawn(top, 3, 4) != drawn(top, 4, 4)
    (top / "passes/sums.py").rename(top / "attngraph/sums.py")
    assert {p.mutant.file for p in found(top, every).values()} == {"attngraph/sums.py"}
    assert found(top, [Mutant("passes/sums.py", "Sum.of", 0, "total + x", "(total * x)")]) == {}


def test_all_mutants_stand_in_one_file_and_one_is_on(tree: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    of = list(enumerate(places(tree(passes__sums=SOURCE), "passes/sums.py")))
    text = copies.switched(SOURCE, of)
    assert text.count("\n") == SOURCE.count("\n")

    def run(text: str, on: int) -> Any:
        monkeypatch.setattr(builtins, "_mutant", lambda n: n == on, raising=False)
        space: dict[str, Any] = {}
        exec(text, space)
        return space["between"](2, 3, 3), space["between"](3, 3, 4), space["Sum"]().of([1, 2])

    assert run(text, -1) == run(SOURCE, -1) == (False, False, (3, 2))
    on = {place.mutant.text: run(text, n) for n, place in of}
    assert on["x < high"] == (True, False, (3, 2)) and on["x > low"] == (False, True, (3, 2))
    assert on["x > low and x < high"] == (True, True, (3, 2)) and on["total + x"][2] == (-3, 2)
    assert on["return x > low and x < high"][:2] == (None, None)


TESTS = """
import os, subprocess, sys
import attngraph
from passes.sums import Sum, between
def test_a_process_sums():
    code = "import attngraph; from passes.sums import Sum; assert Sum().of([1, 2])[0] == 3"
    subprocess.run([sys.executable, "-c", code], check=True)
def test_nothing_of_use():
    assert between(2, 3, 5)
def test_that_no_mutant_may_be_on():
    assert Sum().of([1, 2]) and "ATTNGRAPH_MUTANT" not in os.environ
"""


def test_a_mutant_is_caught_by_a_test_that_passes_without_it(
    tree: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts sooner
    top = tree(passes__sums=SOURCE, tests__test_sums=TESTS)
    of = [p for p in places(top, "passes/sums.py") if p.mutant.text in ("total + x", "x < high")]
    copies.write(top, dict(enumerate(of)))
    rows = {of[number].mutant.text: row for number, row in verdicts(top, [0, 1], ["tests"], 60)}
    assert rows["total + x"]["verdict"] == "caught" and rows["total + x"]["by"].endswith(
        "test_a_process_sums"
    )
    assert rows["x < high"]["verdict"] == "survived"
