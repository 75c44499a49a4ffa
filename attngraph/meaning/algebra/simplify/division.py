"""Floor division and remainder of index expressions, by ranges and by digits."""

import functools

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.ranges import Polynomial


def floordiv(a: Expr, b: Expr) -> Expr:
    """a // b, simplified for b >= 1; by other divisors it is left as it is."""
    return _divide(M.number(a), M.number(b))[0]


def mod(a: Expr, b: Expr) -> Expr:
    """a % b, simplified for b >= 1; by other divisors it is left as it is."""
    return _divide(M.number(a), M.number(b))[1]


@functools.lru_cache(maxsize=1 << 13)
def _divide(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    integers = a.kind == b.kind == "int"
    if integers and a.op == "const" and b.op == "const" and b.value != 0:
        return E.const(a.value // b.value), E.const(a.value % b.value)
    if integers:
        written = ranges.polynomial(a)
        together = _put_together(written)
        a = a if together is written else M.from_polynomial(together)
    kind = M.kind_of((a, b))
    opaque = E.make("floordiv", (a, b), None, kind), E.make("mod", (a, b), None, kind)
    if not integers:
        return opaque
    divisor = ranges.polynomial(b)
    if not (ranges.is_positive(divisor) or _is_multiple_of_an_extent(divisor, a)):
        # A multiple of the divisor is one whatever the divisor's value: no model divides by a size of zero.
        if divisor.keys() - {()}:
            times, more = _long_division(together, divisor)
            return opaque if more else (M.from_polynomial(times), E.ZERO)
        return opaque
    if len(divisor) > 1:
        return _divide_by_sum(together, divisor) or opaque
    multiples, rest = ranges.split_multiples(together, divisor)
    quotient, left = M.from_polynomial(multiples), M.from_polynomial(rest)
    low, high = ranges.bounds(rest)
    if low is not None and high is not None:
        fits = ranges.subtract(ranges.subtract(divisor, {(): 1}), high)
        if ranges.is_nonnegative(low) and ranges.is_nonnegative(fits):
            return quotient, left
    inner = _divide_digits(rest, b) or (_nested_floordiv(left, b), E.make("mod", (left, b), None, "int"))
    return M.add(quotient, inner[0]), inner[1]


def _divide_by_sum(a: Polynomial, divisor: Polynomial) -> tuple[Expr, Expr] | None:
    """Long division by the divisor's leading term; the rest may be one divisor too high or too low."""
    if divisor[_leading(divisor)] < 1:
        return None
    quotient, rest = _long_division(a, divisor)
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


def _is_multiple_of_an_extent(divisor: Polynomial, a: Expr) -> bool:
    """Whether the divisor is a positive multiple of the extent, at least 1, of a variable of `a`."""
    for variable in a.free:
        extent = ranges.polynomial(variable.args[0]) if variable.args else {}
        if extent.keys() - {()}:
            times, rest = _long_division(divisor, extent)
            if not rest and ranges.is_positive(times):
                return True
    return False


def _put_together(a: Polynomial) -> Polynomial:
    """A sum with x % n and n * (x // n) joined into x, and without selections of equal sums."""
    for atom in (x for atoms in a for x in atoms):
        if atom.op == "mod" and (atom,) in a:
            number, size = atom.args
            digit: Polynomial = {(E.make("floordiv", (number, size), None, "int"),): a[(atom,)]}
            slow = ranges.multiply(digit, ranges.polynomial(size))
            if all(a.get(term) == factor for term, factor in slow.items()):
                left = ranges.subtract(ranges.subtract(a, slow), {(atom,): a[(atom,)]})
                number_times = ranges.multiply({(): a[(atom,)]}, ranges.polynomial(number))
                return _put_together(ranges.add(left, number_times))
        if atom.op == "where":
            yes, no = (_where(a, atom.args[0], branch) for branch in (1, 2))
            if yes == no:
                return _put_together(yes)
    return a


def _where(a: Polynomial, condition: Expr, branch: int) -> Polynomial:
    """The sum with selections on `condition` replaced by their branch: 1 where it holds, 2 where not."""
    found: Polynomial = {}
    for atoms, factor in a.items():
        term: Polynomial = {(): factor}
        for atom in atoms:
            chosen = atom.op == "where" and atom.args[0] is condition
            term = ranges.multiply(term, ranges.polynomial(atom.args[branch]) if chosen else {(atom,): 1})
        found = ranges.add(found, term)
    return found


def _leading(a: Polynomial) -> ranges.Monomial:
    return max(a, key=lambda atoms: (len(atoms), [x.order for x in atoms]))


def _long_division(a: Polynomial, divisor: Polynomial) -> tuple[Polynomial, Polynomial]:
    """a = divisor * quotient + rest, where the divisor's leading term divides no term of the rest."""
    leading = _leading(divisor)
    quotient: Polynomial = {}
    rest = a
    while True:
        multiples, _ = ranges.split_multiples(rest, {leading: divisor[leading]})
        if not multiples:
            return quotient, rest
        quotient = ranges.add(quotient, multiples)
        rest = ranges.subtract(rest, ranges.multiply(multiples, divisor))


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
