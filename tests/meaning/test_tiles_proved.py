"""Proofs, by an SMT solver, that what the interval arithmetic leaves out has nothing in it: for any tile
and any sizes, not only for those that other tests draw.

The rules are written once more in the solver's terms; that they are the rules which run is tested on
numbers. Then, for each family of masks: if the rules say "empty" of a tile, no pair of it is kept, and if
they say "full", every pair is.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import parse
from attngraph.meaning.algebra.intervals import Box, bit, bounds

z3 = pytest.importorskip("z3", reason="proofs need z3-solver, of the extra `test`")

FAMILIES = {
    "causal": "k <= q",
    "causal, aligned at the end": "k <= q + n0",
    "not causal": "k > q",
    "window": "k <= q and k > q - n0",
    "window by distance": "k <= q and q - k < n0",
    "window on both sides": "abs(q - k) <= n0",
    "dilated": "(q - k) % 4 == 0 and k <= q",
    "dilated window": "k <= q and q - k < n0 * 3 and (q - k) % 3 == 0",
    "blocks": "q // 64 == k // 64",
    "blocks and those before": "k // 128 <= q // 128 and k <= q",
    "strided": "k <= q and (q - k < n0 or k % 64 == 63)",
    "prefix": "k <= q or k < n0",
    "global tokens": "q < n0 or k < n0 or abs(q - k) <= n1",
    "sinks and a window": "k <= q and (k < n1 or q - k < n0)",
    "lengths": "k < n0 and q < n1",
    "a choice": "where(q < n0, k <= q, k < n1)",
    "extremes": "k <= max(q, n0) and k >= min(q - n1, n0)",
}
"""Masks whose tiles are proved; sizes are any integers from 0."""


def smaller(a: Any, b: Any) -> Any:
    return z3.If(a <= b, a, b)


def larger(a: Any, b: Any) -> Any:
    return z3.If(a >= b, a, b)


def both(a: tuple[Any, Any], b: tuple[Any, Any], op: str, number: Any) -> tuple[Any, Any]:
    """The bounds of an operation on two bounded integers or truth values; truth values are z3's."""
    match op:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            corners = [x * y for x in a for y in b]
            low, high = corners[0], corners[0]
            for corner in corners[1:]:
                low, high = smaller(low, corner), larger(high, corner)
            return low, high
        case "floordiv":
            return a[0] / number, a[1] / number  # of z3's integers, by a positive number: rounded down
        case "mod":
            same = a[0] / number == a[1] / number
            return z3.If(same, a[0] % number, 0), z3.If(same, a[1] % number, number - 1)
        case "min":
            return smaller(a[0], b[0]), smaller(a[1], b[1])
        case "max":
            return larger(a[0], b[0]), larger(a[1], b[1])
        case "le":
            return a[1] <= b[0], a[0] <= b[1]
        case "lt":
            return a[1] < b[0], a[0] < b[1]
        case "ge":
            return b[1] <= a[0], b[0] <= a[1]
        case "gt":
            return b[1] < a[0], b[0] < a[1]
        case "eq":
            return z3.And(a[0] == a[1], b[0] == b[1], a[0] == b[0]), z3.And(a[0] <= b[1], b[0] <= a[1])
        case "and":
            return z3.And(a[0], b[0]), z3.And(a[1], b[1])
        case "or":
            return z3.Or(a[0], b[0]), z3.Or(a[1], b[1])
    raise AssertionError(op)


def bounded(node: Expr, names: dict[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    """The rules of meaning/algebra/intervals.py for the expressions of the families."""
    if node.op == "const":
        return z3.IntVal(node.value), z3.IntVal(node.value)
    if node.op in ("var", "size"):
        return names[node.value]
    args = [bounded(a, names) for a in node.args]
    if node.op == "not":
        return z3.Not(args[0][1]), z3.Not(args[0][0])
    if node.op == "abs":
        low, high = args[0]
        through = z3.And(low <= 0, high >= 0)
        x, y = z3.If(low < 0, -low, low), z3.If(high < 0, -high, high)
        return z3.If(through, 0, smaller(x, y)), larger(x, y)
    if node.op == "where":
        (low, high), a, b = args
        return (
            z3.If(low, a[0], z3.If(z3.Not(high), b[0], z3.And(a[0], b[0]))),
            z3.If(low, a[1], z3.If(z3.Not(high), b[1], z3.Or(a[1], b[1]))),
        )
    return both(args[0], args[1], node.op, node.args[1].value)


def valued(node: Expr, names: dict[str, Any]) -> Any:
    """The expression itself, of integers."""
    if node.op == "const":
        return z3.IntVal(node.value)
    if node.op in ("var", "size"):
        return names[node.value]
    args = [valued(a, names) for a in node.args]
    match node.op, args:
        case "abs", [a]:
            return z3.If(a < 0, -a, a)
        case "not", [a]:
            return z3.Not(a)
        case "where", [c, a, b]:
            return z3.If(c, a, b)
        case "add", [a, b]:
            return a + b
        case "sub", [a, b]:
            return a - b
        case "mul", [a, b]:
            return a * b
        case "floordiv", [a, b]:
            return a / b
        case "mod", [a, b]:
            return a % b
        case "min", [a, b]:
            return smaller(a, b)
        case "max", [a, b]:
            return larger(a, b)
        case "le", [a, b]:
            return a <= b
        case "lt", [a, b]:
            return a < b
        case "ge", [a, b]:
            return a >= b
        case "gt", [a, b]:
            return a > b
        case "eq", [a, b]:
            return a == b
        case "and", [a, b]:
            return z3.And(a, b)
        case "or", [a, b]:
            return z3.Or(a, b)
    raise AssertionError(node.op)


def predicate_of(name: str) -> Expr:
    return parse(f"keep {FAMILIES[name]}").keeps[0].predicate


@pytest.mark.parametrize("name", list(FAMILIES))
def test_no_pair_is_kept_in_an_empty_tile_and_all_are_in_a_full_one(name: str) -> None:
    predicate = predicate_of(name)
    q, k, n0, n1 = z3.Ints("q k n0 n1")
    spans = {"q": z3.Ints("q_low q_high"), "k": z3.Ints("k_low k_high"), "n0": (n0, n0), "n1": (n1, n1)}
    low, high = bounded(predicate, {x: (a, b) for x, (a, b) in spans.items()})
    kept = valued(predicate, {"q": q, "k": k, "n0": n0, "n1": n1})
    inside = [n0 >= 0, n1 >= 0]
    for name_, value in (("q", q), ("k", k)):
        first, last = spans[name_]
        inside += [first >= 0, first <= value, value <= last]
    for wrong in (z3.And(z3.Not(high), kept), z3.And(low, z3.Not(kept))):
        solver = z3.Solver()
        solver.set("timeout", 60_000)
        solver.add(*inside, wrong)
        assert solver.check() == z3.unsat, f"{FAMILIES[name]}: {solver.model()}"


def test_the_solver_finds_a_rule_that_leaves_out_too_much() -> None:
    """Were `k <= q` decided by the last key instead of the first, a counterexample would be found."""
    q, k, q_low, q_high, k_low, k_high = z3.Ints("q k q_low q_high k_low k_high")
    solver = z3.Solver()
    solver.add(q_low >= 0, q_low <= q, q <= q_high, k_low >= 0, k_low <= k, k <= k_high)
    solver.add(z3.Not(k_high <= q_high), k <= q)
    assert solver.check() == z3.sat


@pytest.mark.parametrize("name", list(FAMILIES))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_rules_that_are_proved_are_those_that_run(name: str, data: Any) -> None:
    predicate = predicate_of(name)
    low_q, low_k = data.draw(st.integers(0, 300)), data.draw(st.integers(0, 300))
    q = (low_q, low_q + data.draw(st.integers(0, 200)))
    k = (low_k, low_k + data.draw(st.integers(0, 200)))
    sizes = data.draw(st.tuples(st.integers(0, 300), st.integers(0, 300)))
    spans = {"q": q, "k": k, "n0": (sizes[0],) * 2, "n1": (sizes[1],) * 2}
    names = {x: (z3.IntVal(a), z3.IntVal(b)) for x, (a, b) in spans.items()}
    low, high = (z3.is_true(z3.simplify(x)) for x in bounded(predicate, names))
    one = (0.0, 0.0)
    box = Box(one, one, (float(q[0]), float(q[1])), (float(k[0]), float(k[1])), sizes)
    least, greatest = bit(bounds(predicate, box, {}))
    assert (bool(least >= 1), bool(greatest > 0)) == (low, high)
