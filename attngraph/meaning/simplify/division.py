"""Floor division and remainder of index expressions, by ranges and by digits."""

from __future__ import annotations

from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.meaning import ranges
from attngraph.meaning import simplify as M
from attngraph.meaning.ranges import Polynomial


def floordiv(a: Expr, b: Expr) -> Expr:
    """a // b for b >= 1; other divisors stay as they are."""
    return _divide(M.number(a), M.number(b))[0]


def mod(a: Expr, b: Expr) -> Expr:
    """a % b for b >= 1; other divisors stay as they are."""
    return _divide(M.number(a), M.number(b))[1]


def _divide(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    opaque = (
        E.make("floordiv", (a, b), None, M.kind_of((a, b))),
        E.make("mod", (a, b), None, M.kind_of((a, b))),
    )
    if a.kind != "int" or b.kind != "int":
        return opaque
    if a.op == "const" and b.op == "const" and b.value != 0:
        return E.const(a.value // b.value), E.const(a.value % b.value)
    divisor = ranges.polynomial(b)
    if len(divisor) != 1 or not ranges.is_positive(divisor):
        return opaque
    multiples, rest = ranges.split_multiples(ranges.polynomial(a), divisor)
    quotient, remainder = M.from_polynomial(multiples), M.from_polynomial(rest)
    low, high = ranges.bounds(rest)
    if low is not None and high is not None:
        fits = ranges.subtract(ranges.subtract(divisor, {(): 1}), high)
        if ranges.is_nonnegative(low) and ranges.is_nonnegative(fits):
            return quotient, remainder
    inner = _divide_digits(rest, b) or (
        _nested_floordiv(remainder, b),
        E.make("mod", (remainder, b), None, "int"),
    )
    return M.add(quotient, inner[0]), inner[1]


def _nested_floordiv(a: Expr, b: Expr) -> Expr:
    if a.op == "floordiv" and ranges.is_positive(ranges.polynomial(a.args[1])):
        return floordiv(a.args[0], M.mul(a.args[1], b))
    return E.make("floordiv", (a, b), None, "int")


def _divide_digits(a: Polynomial, b: Expr) -> tuple[Expr, Expr] | None:
    """(g*x + r) divided by g*m, where 0 <= r < g: quotient x // m, remainder g*(x % m) + r."""
    if b.op != "const":
        return None
    for g in sorted({abs(c) for c in a.values()}, reverse=True):
        if g in (0, 1) or g >= b.value or b.value % g:
            continue
        high, low = ranges.split_multiples(a, {(): g})
        lower, upper = ranges.bounds(low)
        if lower is None or upper is None or not ranges.is_nonnegative(lower):
            continue
        if ranges.is_nonnegative(ranges.subtract({(): g - 1}, upper)):
            digit, m = M.from_polynomial(high), E.const(b.value // g)
            return floordiv(digit, m), M.add(M.mul(E.const(g), mod(digit, m)), M.from_polynomial(low))
    return None
