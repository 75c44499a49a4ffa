"""Faults of synchronisation written into a kernel, one at a time, and which of them the simulator notices.

Each wait, arrival, fence and barrier is left out; each is moved by one: waits past the next access to memory,
arrivals before the last one, fences either way; each phase, count, number of bytes and number of operations
that may be pending is one off; and atomics and waits tell of less (`sem`, `read_only`).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workshop.simulator.cases import Case
from workshop.simulator.order import Wrong
from workshop.simulator.source import is_jit

WAITS = {"wait", "store_wait", "warpgroup_mma_wait"}
TOLD = {"arrive", "expect", "init", "tcgen05_commit", "atomic_add", "atomic_xchg"}
FENCES = {"fence_async_shared", "barrier", "inline_asm_elementwise"}
ACCESSES = {
    "warpgroup_mma", "warpgroup_mma_wait", "tcgen05_mma", "load", "store", "async_load", "async_store",
    "async_copy_global_to_shared", "async_copy_shared_to_global", "async_atomic_add", "atomic_add",
}  # fmt: skip
ASYNCHRONOUS = {name for name in ACCESSES if name.startswith("async")} | {"warpgroup_mma", "tcgen05_mma"}
NUMBERS = {
    "wait": ("phase", 1), "init": ("count", 1), "expect": ("bytes_per_cta", 1), "store_wait": ("pendings", 0),
    "warpgroup_mma_wait": ("num_outstanding", 0),
}  # fmt: skip
"""The argument that may be one off: its keyword and its place."""


@dataclass(frozen=True)
class Mutant:
    """One fault: what was done, to which line of the kernel, and the text with it."""

    kind: str
    line: int
    what: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.what}"


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a module's kernels."""
    tree, lines = ast.parse(text), text.splitlines()
    for function in tree.body:
        for node in ast.walk(function) if is_jit(function) else ():
            bodies: list[Any] = [getattr(node, field, None) for field in ("body", "orelse")]
            for body in bodies:
                for place in range(len(body)) if isinstance(body, list) else ():
                    kept, line = [*body], body[place].lineno
                    for kind, changed in _changes(kept, place):
                        body[:] = changed or [ast.Pass()]
                        yield Mutant(
                            kind, line, _what(lines, line), ast.unparse(ast.fix_missing_locations(tree))
                        )
                        body[:] = kept


def _what(lines: list[str], line: int) -> str:
    """A line's text, and which one it is of several that are equal."""
    text = lines[line - 1].strip()
    several = [n for n, each in enumerate(lines, 1) if each.strip() == text]
    return text if len(several) == 1 else f"{text} (#{several.index(line) + 1})"


def _changes(body: list[ast.stmt], place: int) -> Iterator[tuple[str, list[ast.stmt]]]:
    statement, before, after = body[place], body[:place], body[place + 1 :]
    name = _name(_call_of(statement))
    spins = isinstance(statement, ast.While) and "atomic" in ast.unparse(statement.test)
    if spins or name in WAITS | TOLD | FENCES:
        yield "left out", [*before, *_without(statement), *after]
    for step in {**dict.fromkeys(WAITS, (1,)), "arrive": (-1,), **dict.fromkeys(FENCES, (1, -1))}.get(
        name, ()
    ):
        past = ACCESSES if name not in FENCES else ASYNCHRONOUS if step > 0 else {"store"}
        other = place + step
        while 0 <= other < len(body) and not past & {_name(n) for n in ast.walk(body[other])}:
            other += step
        if 0 <= other < len(body):
            moved = [*before, *after]
            moved.insert(other, statement)
            yield "later" if step > 0 else "earlier", moved
    keyword, at = NUMBERS.get(name, ("", 0))
    signs = {"phase": ast.BitXor()} if keyword == "phase" else {"+ 1": ast.Add(), "- 1": ast.Sub()}
    for kind, sign in signs.items() if keyword else ():
        changed = copy.deepcopy(statement)
        call = _call_of(changed)
        given = [k for k in call.keywords if k.arg == keyword]
        value = given[0].value if given else call.args[at] if at < len(call.args) else ast.Constant(0)
        if kind == "- 1" and isinstance(value, ast.Constant) and value.value == 0:
            continue
        call.keywords = [k for k in call.keywords if k not in given]
        call.args[at : at + 1] = [ast.BinOp(value, sign, ast.Constant(1))]
        yield kind, [*before, changed, *after]
    for word, weaker in (("sem", "relaxed"), ("read_only", True)):
        changed = copy.deepcopy(statement)
        told = [k for n in ast.walk(changed) if isinstance(n, ast.Call) for k in n.keywords if k.arg == word]
        if told and not isinstance(statement, ast.For | ast.If):
            for each in told:
                each.value = ast.Constant(weaker)
            yield f"{word}={weaker}", [*before, changed, *after]


def _call_of(node: ast.stmt) -> Any:
    value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    return value if isinstance(value, ast.Call) else None


def _name(node: Any) -> str:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", ""))


def _without(statement: ast.stmt) -> list[ast.stmt]:
    """Nothing, or the operands of a wait under the names of its results."""
    if not isinstance(statement, ast.Assign):
        return []
    deps = next(k.value for k in _call_of(statement).keywords if k.arg == "deps")
    values = deps.elts if isinstance(deps, ast.Tuple | ast.List) else [deps]
    value = values[0] if len(values) == 1 else ast.Tuple(values, ast.Load())
    return [ast.Assign(statement.targets, value, lineno=statement.lineno)]


def noticed(case: Case, mutant: Mutant, orders: int) -> str:
    """What the simulator says of a mutant, in its first line; nothing if no order shows it."""
    try:
        case.orders(orders, mutant.text)
    except (Wrong, AssertionError) as problem:
        return f"{type(problem).__name__}: {problem}".splitlines()[0]
    return ""
