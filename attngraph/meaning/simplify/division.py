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
    if not ranges.is_positive(divisor):
        return opaque
    if len(divisor) > 1:
        return _divide_by_sum(ranges.polynomial(a), divisor) or opaque
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


def _divide_by_sum(a: Polynomial, divisor: Polynomial) -> tuple[Expr, Expr] | None:
    """Long division by the divisor's leading term; the rest may be one divisor too high or too low."""
    leading = max(divisor, key=lambda atoms: (len(atoms), [x.serial for x in atoms]))
    if divisor[leading] != 1:
        return None
    quotient: Polynomial = {}
    rest = a
    while True:
        multiples, _ = ranges.split_multiples(rest, {leading: 1})
        if not multiples:
            break
        quotient = ranges.add(quotient, multiples)
        rest = ranges.subtract(rest, ranges.multiply(multiples, divisor))
    low, high = ranges.bounds(rest)
    if low is None or high is None:
        return None
    whole, left, size = (M.from_polynomial(p) for p in (quotient, rest, divisor))
    below = ranges.is_nonnegative(low)
    above = ranges.is_positive(ranges.subtract(divisor, high))
    if below and above:
        return whole, left
    if above and ranges.is_nonnegative(ranges.add(low, divisor)):
        is_low = M.le(left, E.const(-1))
        return M.where(is_low, M.sub(whole, E.ONE), whole), M.where(is_low, M.add(left, size), left)
    if below and ranges.is_positive(ranges.subtract(ranges.add(divisor, divisor), high)):
        is_high = M.le(size, left)
        return M.where(is_high, M.add(whole, E.ONE), whole), M.where(is_high, M.sub(left, size), left)
    return None


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
