"""Sums over index variables: factors that do not vary are moved out, and a sum can be cut into pieces."""

import itertools
import math

from attngraph.ir import budgets
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M


def total(variable: Expr, body: Expr) -> Expr:
    """The sum of `body` over the variable's extent; what does not vary is moved out of it."""
    if variable not in body.free:
        return M.mul(variable.args[0], body)
    if body.op == "mul":
        fixed = [f for f in body.args if variable not in f.free]
        if fixed:
            return M.mul(*fixed, total(variable, M.mul(*(f for f in body.args if variable in f.free))))
    if body.op == "add" and body.kind == "float":
        fixed = [
            t for t in body.args if variable not in t.free and t.op == "const" and math.isfinite(t.value)
        ]
        if fixed:
            rest = M.add(*(t for t in body.args if t not in fixed))
            return M.add(total(variable, rest), M.mul(variable.args[0], *fixed))
    return E.make("sum", (variable, body), None, "int" if body.kind == "int" else "float")


def pieces(variable: Expr, body: Expr, few: int = budgets.SUMMANDS) -> list[Expr]:
    """The sum of `body` over the variable as terms that add up to it: the range is cut wherever a
    comparison of the variable with a size or a number changes its answer. In a piece of at most `few`
    elements, each element is a term of its own."""
    extent = variable.args[0]
    bounds = _ordered([E.ZERO, *_thresholds(variable, body), extent])
    if bounds is None:
        return [total(variable, body)]
    found = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        length = M.sub(stop, start)
        if length.op == "const" and length.value <= few:
            found += [M.substitute(body, {variable: M.add(E.const(n), start)}) for n in range(length.value)]
            continue
        place = E.var(f"{variable.value}:{number}", length)
        found.append(total(place, M.substitute(body, {variable: M.add(place, start)})))
    return found


def _thresholds(variable: Expr, body: Expr) -> list[Expr]:
    """The places where a comparison with the variable alone changes its answer."""
    found: dict[Expr, None] = {}
    for node in E.walk(body):
        if node.op not in ("le", "eq") or node.args[0].kind != "int" or variable not in node.free:
            continue
        difference = ranges.subtract(ranges.polynomial(node.args[0]), ranges.polynomial(node.args[1]))
        factor = difference.pop((variable,), 0)
        rest = M.from_polynomial(difference)
        if factor not in (1, -1) or rest.free or any(a.op not in ("size", "const") for a in _leaves(rest)):
            continue
        place = M.neg(rest) if factor == 1 else rest
        if node.op == "eq":
            found.update({place: None, M.add(place, E.ONE): None})
        else:
            found[M.add(place, E.ONE) if factor == 1 else place] = None
    return list(found)


def _leaves(node: Expr) -> list[Expr]:
    return [n for n in E.walk(node) if not n.args]


def _ordered(places: list[Expr]) -> list[Expr] | None:
    """The places between the first and the last in ascending order; None where that cannot be shown."""
    first, last = places[0], places[-1]
    ordered: list[Expr] = [first]
    for place in places[1:]:
        if place in ordered or not _at_most(place, last) or not _at_most(first, place):
            if place in ordered or _at_most(last, place) or _at_most(place, first):
                continue  # beyond the range: no cut
            return None
        before = [p for p in ordered if _at_most(p, place)]
        if any(not _at_most(place, p) for p in ordered[len(before) :]) or before != ordered[: len(before)]:
            return None
        ordered.insert(len(before), place)
    return ordered


def _at_most(a: Expr, b: Expr) -> bool:
    return ranges.is_nonnegative(ranges.subtract(ranges.polynomial(b), ranges.polynomial(a)))
