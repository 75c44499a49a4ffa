"""Quotients of sums of exponentials, in a form in which equal references cancel.

A sum is terms exp(e) * r with the exponents e kept apart; a fraction is one such sum, times other sums to
powers. The shape of a sum is what is left without the exponents and the number that all of its terms share,
so a sum that was rescaled by exp(m - m') has the shape that it had, and cancels against its own reciprocal.
Nothing here knows of graphs.
"""

import dataclasses
from collections.abc import Mapping

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import simplify as M


class NotASum(Exception):
    """The value is no quotient of sums of exponentials, or is not seen to be one."""


Term = tuple[Expr, Expr]
"""exp(first) * second. The second has no exponential outside of a sum over keys."""
Sum = Mapping[Term, float]
"""Terms, each with a number that it is multiplied by."""
Shape = frozenset[tuple[Expr, Expr, float]]
"""A sum without its scale: two sums that differ by exp(x) and a number have one shape."""


@dataclasses.dataclass(frozen=True)
class Fraction:
    """A sum, times sums to powers. `sums` has the terms of each shape in `powers`."""

    terms: Sum
    powers: Mapping[Shape, int]
    sums: Mapping[Shape, Sum]


Value = tuple[Fraction, ...]
"""Fractions that are added up and that have no simple common form; usually one. None of them is zero."""


def single(exponent: Expr, rest: Expr, number: float = 1.0) -> Value:
    return (Fraction({(exponent, rest): number}, {}, {}),)


def _scaled(terms: Sum, exponent: Expr, rest: Expr, number: float) -> Sum:
    found: dict[Term, float] = {}
    for (e, r), c in terms.items():
        key = M.add(e, exponent), r if rest is E.ONE else M.mul(rest, r)
        found[key] = found.get(key, 0.0) + c * number
    return found


def addends(node: Expr) -> tuple[Expr, ...]:
    return node.args if node.op == "add" else () if E.is_const(node, 0) else (node,)


def _shape(terms: Sum) -> tuple[Expr, float, Shape]:
    """A sum as exp(exponent) * number * its shape: the exponent is what all of its terms share."""
    common = set.intersection(*(set(addends(e)) for e, _ in terms))
    exponent = M.add(*sorted(common, key=lambda a: a.order))
    minus = M.neg(exponent)
    unit = {(M.add(e, minus), r): c for (e, r), c in terms.items()}
    number = unit[min(unit, key=lambda t: (t[1].order, t[0].order))]
    return exponent, number, frozenset((e, r, c / number) for (e, r), c in unit.items())


def _is_plain(terms: Sum) -> bool:
    """Whether a sum has one term, which is itself no sum over keys."""
    return len(terms) == 1 and all(n.op != "sum" for _, r in terms for n in E.walk(r))


def _is_exponential(terms: Sum) -> bool:
    """Whether a sum is one exponential times a number."""
    return len(terms) == 1 and all(r is E.ONE for _, r in terms)


def _holds_values(terms: Sum) -> bool:
    """Whether a sum has another factor than exponentials."""
    return any(n.op in ("read", "mul") for _, r in terms for n in E.outside(r, "exp"))


def fraction(terms: Sum, powers: Mapping[Shape, int], sums: Mapping[Shape, Sum]) -> Value:
    """A fraction in which equal sums above and below are cancelled."""
    terms = {t: c for t, c in terms.items() if c != 0}
    if not terms:
        return ()
    powers = {s: p for s, p in powers.items() if p}
    if not _is_plain(terms):
        exponent, number, shape = _shape(terms)
        if powers.get(shape, 0) < 0:
            powers[shape] += 1
            terms = {(exponent, E.ONE): number}
            powers = {s: p for s, p in powers.items() if p}
    above = next((s for s, p in powers.items() if p > 0), None)
    if above is not None and _is_plain(terms):
        (((exponent, rest), number),) = terms.items()
        left = {**powers, above: powers[above] - 1}
        return fraction(_scaled(sums[above], exponent, rest, number), left, sums)
    return (Fraction(terms, powers, {shape: sums[shape] for shape in powers}),)


def _times(a: Fraction, b: Fraction) -> Value:
    powers = dict(a.powers)
    for shape, power in b.powers.items():
        powers[shape] = powers.get(shape, 0) + power
    sums = {**a.sums, **b.sums}
    for one, other in ((a, b), (b, a)):
        if _is_plain(one.terms):
            (((exponent, rest), number),) = one.terms.items()
            return fraction(_scaled(other.terms, exponent, rest, number), powers, sums)
    # Of two sums one becomes a power: one that cancels, else one that holds no values.
    ways = [(one, other, _shape(one.terms)) for one, other in ((a, b), (b, a))]
    ways.sort(key=lambda way: (powers.get(way[2][2], 0) >= 0, _holds_values(way[0].terms)))
    one, other, (exponent, number, shape) = ways[0]
    powers[shape] = powers.get(shape, 0) + 1
    unit = _scaled(one.terms, M.neg(exponent), E.ONE, 1 / number)
    return fraction(_scaled(other.terms, exponent, E.ONE, number), powers, {**sums, shape: unit})


def multiply(a: Value, b: Value) -> Value:
    return add(*(x for one in a for other in b for x in _times(one, other)))


def reciprocal(value: Value) -> Value:
    if len(value) != 1:
        raise NotASum
    (found,) = value
    if _is_plain(found.terms):
        (((exponent, rest), number),) = found.terms.items()
        terms = {(M.neg(exponent), M.recip(rest)): 1 / number}
        return fraction(terms, {s: -p for s, p in found.powers.items()}, found.sums)
    exponent, number, shape = _shape(found.terms)
    unit = _scaled(found.terms, M.neg(exponent), E.ONE, 1 / number)
    powers = {s: -p for s, p in found.powers.items()}
    powers[shape] = powers.get(shape, 0) - 1
    return fraction({(M.neg(exponent), E.ONE): 1 / number}, powers, {**found.sums, shape: unit})


def add(*fractions: Fraction) -> Value:
    """The sum, with as few fractions as these rules give."""
    kept: list[Fraction] = []
    waiting = list(fractions)
    while waiting:
        current = waiting.pop(0)
        for place, other in enumerate(kept):
            joined = _joined(other, current)
            if joined is not None:
                del kept[place]
                waiting = [*joined, *waiting]
                break
        else:
            kept.append(current)
    return tuple(kept)


def _joined(a: Fraction, b: Fraction) -> Value | None:
    """Two fractions over one divisor, where one sum at most is in the way of each."""
    sums = {**a.sums, **b.sums}
    if a.powers == b.powers:
        return fraction(_added(a.terms, b.terms), a.powers, sums)
    both = [a, b]
    common = {s: min(x.powers.get(s, 0) for x in both) for s in {**a.powers, **b.powers}}
    left = [[s for s, p in common.items() for _ in range(x.powers.get(s, 0) - p)] for x in both]
    if any(len(own) > 1 for own in left):
        return None
    factor = None
    if not all(_is_exponential(x.terms) for x, own in zip(both, left, strict=True) if own):
        # N / Z1 - N * Z2 / (Z1 * Z12) is N * (Z12 - Z2) / (Z1 * Z12).
        (e, n, shape), (f, m, other) = (_shape(x.terms) for x in both)
        if shape != other:
            return None
        factor = Fraction(_scaled(a.terms, M.neg(e), E.ONE, 1 / n), {}, {})
        both = [Fraction({(e, E.ONE): n}, {}, {}), Fraction({(f, E.ONE): m}, {}, {})]
    terms: Sum = {}
    for x, own in zip(both, left, strict=True):
        mine = x.terms
        if own:
            (((exponent, rest), number),) = mine.items()
            mine = _scaled(sums[own[0]], exponent, rest, number)
        terms = _added(terms, mine)
    quotient = fraction(terms, common, sums)
    if factor is None:
        return quotient
    if not all(_is_plain(x.terms) for x in quotient):
        return None
    return tuple(y for x in quotient for y in _times(x, factor))


def _added(a: Sum, b: Sum) -> Sum:
    found = dict(a)
    for term, number in b.items():
        found[term] = found.get(term, 0.0) + number
    return found
