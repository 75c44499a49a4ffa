"""Ranges of index expressions: integer polynomials over variables and sizes, and their bounds.

An index variable runs from 0 to its extent minus one; a size is at least 1, since otherwise there is
no element. A polynomial maps monomials (sorted tuples of atoms) to integer factors.
Everything here is sound and incomplete: "yes" is proved, "no" may mean "not shown".
"""

import math
from collections.abc import Sequence

from attngraph.ir.language.expr import Expr, walk

Monomial = tuple[Expr, ...]
Polynomial = dict[Monomial, int]


def polynomial(node: Expr) -> Polynomial:
    """An integer expression as a polynomial; parts other than sums and products are atoms."""
    if node.op == "const":
        return {(): int(node.value)} if node.value else {}
    if node.op == "add":
        found: Polynomial = {}
        for term in node.args:
            for atoms, times in polynomial(term).items():
                found[atoms] = found.get(atoms, 0) + times
        return {atoms: times for atoms, times in found.items() if times}
    if node.op == "mul":
        found = {(): 1}
        for factor in node.args:
            found = multiply(found, polynomial(factor))
        return found
    return {(node,): 1}


def add(a: Polynomial, b: Polynomial) -> Polynomial:
    found = dict(a)
    for atoms, factor in b.items():
        found[atoms] = found.get(atoms, 0) + factor
    return {atoms: factor for atoms, factor in found.items() if factor}


def multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for x, m in a.items():
        for y, n in b.items():
            atoms = tuple(sorted(x + y, key=lambda e: e.order))
            found[atoms] = found.get(atoms, 0) + m * n
    return {atoms: factor for atoms, factor in found.items() if factor}


def subtract(a: Polynomial, b: Polynomial) -> Polynomial:
    return add(a, {atoms: -factor for atoms, factor in b.items()})


def split_multiples(a: Polynomial, divisor: Polynomial) -> tuple[Polynomial, Polynomial]:
    """a = divisor * multiples + rest, term by term; the divisor is one monomial."""
    ((atoms, factor),) = divisor.items()
    multiples: Polynomial = {}
    rest: Polynomial = {}
    for monomial, n in a.items():
        left = list(monomial)
        for atom in atoms:
            if atom not in left:
                break
            left.remove(atom)
        else:
            quotient, remainder = divmod(n, factor)
            if quotient:
                multiples[tuple(left)] = multiples.get(tuple(left), 0) + quotient
            if remainder:
                rest[monomial] = remainder
            continue
        rest[monomial] = n
    return multiples, rest


def bounds(a: Polynomial) -> tuple[Polynomial | None, Polynomial | None]:
    """The least and the greatest value, as polynomials over sizes; None where unknown."""
    low: Polynomial | None = {}
    high: Polynomial | None = {}
    for atoms, factor in a.items():
        least: Polynomial | None = {(): factor}
        most: Polynomial | None = {(): factor}
        for atom in atoms:
            atom_low, atom_high = _atom_bounds(atom)
            if len(atoms) == 1:
                least = None if atom_low is None else multiply({(): factor}, atom_low)
                most = None if atom_high is None else multiply({(): factor}, atom_high)
                break
            if atom_low is None or not is_nonnegative(atom_low):
                least = most = None
                break
            least = multiply(least, atom_low) if least is not None else None
            most = multiply(most, atom_high) if most is not None and atom_high is not None else None
        if factor < 0:
            least, most = most, least
        low = add(low, least) if low is not None and least is not None else None
        high = add(high, most) if high is not None and most is not None else None
    return low, high


def _atom_bounds(atom: Expr) -> tuple[Polynomial | None, Polynomial | None]:
    match atom.op:
        case "size":
            return ({(atom,): 1}, {(atom,): 1}) if _is_extent(atom) else (None, None)
        case "var" if atom.args:
            return {}, subtract(polynomial(atom.args[0]), {(): 1})
        case "var" | "abs":
            return {}, None
        case "mod" if is_positive(polynomial(atom.args[1])):
            return {}, subtract(polynomial(atom.args[1]), {(): 1})
        case "floordiv" if _is_of_sizes(atom):
            return {(atom,): 1}, {(atom,): 1}
        case "floordiv" if is_positive(polynomial(atom.args[1])):
            return _quotient_bounds(atom)
        case "where" | "min" | "max" if atom.kind == "int":
            branches = atom.args[1:] if atom.op == "where" else atom.args
            lows, highs = zip(*(bounds(polynomial(branch)) for branch in branches), strict=True)
            # A minimum is at least the least lower bound and at most every upper one; a maximum likewise.
            return _extreme(lows, -1, atom.op == "max"), _extreme(highs, 1, atom.op == "min")
    return None, None


def _is_of_sizes(atom: Expr) -> bool:
    """Whether an atom is a quotient of sizes alone, at least 0: it is then its own bound, as a size is."""
    if atom.op != "floordiv" or atom.free or any(n.op not in _OF_SIZES for n in walk(atom)):
        return False
    return is_positive(polynomial(atom.args[1])) and _quotient_bounds(atom)[0] is not None


_OF_SIZES = ("size", "const", "add", "mul", "floordiv")


def _quotient_bounds(atom: Expr) -> tuple[Polynomial | None, Polynomial | None]:
    """The bounds of a quotient by a positive number."""
    low, high = bounds(polynomial(atom.args[0]))
    at_least_zero = low is not None and is_nonnegative(low)
    divisor = polynomial(atom.args[1])
    if high is not None and set(high) <= {()} and set(divisor) == {()}:
        high = {(): high.get((), 0) // divisor[()]}
        high = {a: c for a, c in high.items() if c}
    elif high is not None and not is_nonnegative(high):
        high = None  # a negative number grows when it is divided
    return ({} if at_least_zero else None), high


def _extreme(limits: Sequence[Polynomial | None], sign: int, either: bool) -> Polynomial | None:
    """The outermost limit in the direction of `sign`. With `either` each limit is valid by itself, and it
    is the innermost one that can be determined, a number before others that it cannot be compared with. None
    where limits are unknown or cannot be compared."""
    known = sorted((x for x in limits if x is not None), key=lambda x: either and not set(x) <= {()})
    if not known or (len(known) < len(limits) and not either):
        return None
    found = known[0]
    for other in known[1:]:
        difference = subtract(other, found)
        grows = is_nonnegative({a: sign * c for a, c in difference.items()})
        if grows != is_nonnegative({a: -sign * c for a, c in difference.items()}):
            found = other if grows != either else found
        elif not grows and not either:
            return None
    return found


def _is_extent(size: Expr) -> bool:
    """Whether a size is an extent of an input, so at least 1. A number that the model computes from
    data (torch calls those u0, u1, ... and zuf0, ...) may be anything."""
    return not str(size.value).startswith(("u", "zuf"))


def is_nonnegative(a: Polynomial) -> bool:
    """Whether a >= 0 for all sizes >= 1 (a polynomial over sizes only): every factor is nonnegative once
    each size n is written as 1 + n', perhaps after replacing quotients of sizes by their bounds."""
    if all(factor >= 0 for factor in _shifted(a).values()):
        return True
    if not any(map(_is_of_sizes, (atom for atoms in a for atom in atoms))):
        return False
    least = _least(a)
    return least is not None and all(factor >= 0 for factor in _shifted(least).values())


def _least(a: Polynomial) -> Polynomial | None:
    """A lower limit of a polynomial over sizes, without the quotients in it."""
    found: Polynomial = {}
    for atoms, factor in a.items():
        term: Polynomial = {(): factor}
        for atom in atoms:
            own: Polynomial = {(atom,): 1}
            limit = _quotient_bounds(atom)[factor < 0] if _is_of_sizes(atom) else own
            if limit is None:
                return None
            term = multiply(term, limit)
        found = add(found, term)
    return found


def is_never_negative(a: Polynomial) -> bool:
    """Whether a >= 0 for all values of its variables, and all sizes >= 1."""
    low, _ = bounds(a)
    return low is not None and is_nonnegative(low)


def is_at_most(a: Expr, b: Expr) -> bool:
    """Whether a <= b for all sizes >= 1."""
    return is_nonnegative(subtract(polynomial(b), polynomial(a)))


def is_positive(a: Polynomial) -> bool:
    return is_nonnegative(subtract(a, {(): 1}))


def _shifted(a: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for atoms, factor in a.items():
        term: Polynomial = {(): factor}
        for atom in atoms:
            if atom.op == "size" and _is_extent(atom):
                term = multiply(term, {(): 1, (atom,): 1})
            elif _is_of_sizes(atom):
                term = multiply(term, {(atom,): 1})
            else:
                return {(): -1}  # an atom that is no extent: nothing is known
        found = add(found, term)
    return found


def tighten(a: Polynomial) -> Polynomial:
    """a <= 0 divided by the common factor of its variables, the constant rounded to match."""
    common = math.gcd(*(factor for atoms, factor in a.items() if atoms))
    if common <= 1:
        return a
    scaled = {atoms: factor // common for atoms, factor in a.items() if atoms}
    constant = -((-a.get((), 0)) // common)
    return add(scaled, {(): constant} if constant else {})
