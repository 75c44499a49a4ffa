"""Where a function can be changed a little: a comparison, `and` for `or`, a `not` dropped, a number one
larger, a sum for a difference, a call or an answer left out.

A mutant is known by the function's name, the text that is changed and the text in its place, so that the same
mutant is found after code has moved to another file.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOMS = ("attngraph/meaning", "passes", "attngraph/runtime", "codegen")
SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_NEVER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.JoinedStr, ast.pattern)
"""What is not looked into: functions in functions come on their own, and words are no behaviour."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`ordinal`: which of the equal texts in the function."""

    file: str
    function: str
    ordinal: int
    text: str
    instead: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a mutant stands: from which to which character of its file the expression `value` is, and the
    expression that takes its place."""

    mutant: Mutant
    start: int
    end: int
    value: str


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one small fault; None if it is of no kind that is changed."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPS:
            return ast.Compare(left, [SWAPS[type(op)]()], right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(SWAPS[type(op)](), values)
        case ast.BinOp(left, op, right) if type(op) in SWAPS and not any(map(_is_text, (left, right))):
            return ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value)):
            return ast.Constant(value + 1)
        case ast.Expr(ast.Call()):
            return ast.Constant(None)
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            return ast.Return(ast.Constant(None))
    return None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def places(top: Path, file: str) -> Iterator[Place]:
    """All mutants of a file of a tree."""
    text = (top / file).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    for name, body in _functions(ast.parse(text)):
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        for node in body:
            other = changed(node)
            where = node.value if isinstance(node, (ast.Return, ast.Expr)) else node
            if other is None or not isinstance(where, ast.expr):
                continue
            last = where.end_lineno or where.lineno
            if not all(line.isascii() for line in lines[where.lineno - 1 : last]):
                continue  # columns are counted in bytes
            new = ast.unparse(ast.fix_missing_locations(other))
            new = new if isinstance(node, (ast.stmt, ast.Constant)) else f"({new})"
            key = (ast.unparse(node), new)
            start = starts[where.lineno - 1] + where.col_offset
            end = starts[last - 1] + (where.end_col_offset or 0)
            yield Place(Mutant(file, name, seen[key], *key), start, end, new.removeprefix("return "))
            seen[key] += 1


def _functions(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """The functions of a file, and what runs in each when it is called."""

    def inside(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, _NEVER):
            return
        yield node
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and field not in ("annotation", "returns"):
                    yield from inside(child)

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, list[ast.AST]]]:
        for child in ast.iter_child_nodes(node):
            own = f"{name}.{child.name}" if hasattr(child, "name") and name else getattr(child, "name", name)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield own, [n for statement in child.body for n in inside(statement)]
            yield from walk(child, own if isinstance(own, str) else name)

    return walk(tree, "")


def files(top: Path, rooms: Iterable[str]) -> list[str]:
    """The Python files of rooms, but those whose functions are read as text and never run."""
    found = (path.relative_to(top) for room in rooms for path in sorted((top / room).rglob("*.py")))
    return [str(path) for path in found if "kernels" not in path.parts]


def drawn(top: Path, seed: int, count: int) -> list[Mutant]:
    """Mutants of the rooms, each as likely as any other."""
    every = [p.mutant for file in files(top, ROOMS) for p in places(top, file)]
    return random.Random(seed).sample(every, count)


def found(top: Path, mutants: Iterable[Mutant]) -> dict[int, Place]:
    """Where mutants are in a tree: in their file, or else the first that has the function with this text."""
    known: dict[Mutant, list[Place]] = collections.defaultdict(list)
    for file in files(top, ("attngraph", "passes", "codegen")):
        for place in places(top, file):
            known[dataclasses.replace(place.mutant, file="")].append(place)
    met = {n: (m, known[dataclasses.replace(m, file="")]) for n, m in enumerate(mutants)}
    return {n: next((p for p in of if p.mutant.file == m.file), of[0]) for n, (m, of) in met.items() if of}
