"""One name for sizes that are equal: the relations that a trace found, solved for what they can replace.

`n == m` lets `m` stand for `n`. A relation that speaks of a symbol by itself, `n == 9 - max(0, 9 - n)`, says
what another part of it is: here that `max(0, 9 - n)` is `9 - n`. A name never contains what it stands for, so
replacing ends. What is no such relation (`2 * n == 3 * m`) renames only a formula that is one of its sides.
"""

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import sympy

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.sizes import from_sympy
from attngraph.meaning.rule import Unliftable


class SizeNames:
    """The names by the sympy relations in `conditions`; those of other forms say nothing here."""

    def __init__(self, conditions: Iterable[Any]) -> None:
        self._names: dict[Expr, Expr] = {}
        equal = [c.args for c in conditions if isinstance(c, sympy.Eq)]
        # Symbols come first, so that what is found of formulas is told of symbols that keep their names.
        for sides in sorted(equal, key=lambda sides: not all(s.is_Symbol or s.is_Number for s in sides)):
            with contextlib.suppress(Unliftable):
                self._learn(*(self.of(from_sympy(side)) for side in sides))

    def __bool__(self) -> bool:
        return bool(self._names)

    def _learn(self, a: Expr, b: Expr) -> None:
        found = _named(a, b) or _named(b, a) or _solved(a, b)
        if found is None and a.op != "const" and not _contains(b, a):
            found = a, b
        if found is not None:
            self._names[found[0]] = found[1]

    def of(self, size: Expr) -> Expr:
        """A size, or a formula of sizes, in the names that stand for all that are equal to them."""
        if not self._names or size.op == "const":
            return size
        return E.rebuild(size, lambda n, args: self._whole(M.construct(n, args)))

    def _whole(self, size: Expr) -> Expr:
        while size in self._names:
            size = self.of(self._names[size])
        return size


def _named(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """A symbol, and the formula without it that it equals."""
    return (a, b) if a.op == "size" and not _contains(b, a) else None


def _contains(formula: Expr, part: Expr) -> bool:
    return any(n is part for n in E.walk(formula))


def _solved(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """A symbol that is a product of others, or the only part that is no symbol, and what it equals."""
    terms = ranges.subtract(ranges.polynomial(a), ranges.polynomial(b))
    common = math.gcd(*terms.values())
    alone = {atoms[0]: n // common for atoms, n in terms.items() if len(atoms) == 1}
    parts = [n for atoms in terms for n in atoms if n.op != "size"]
    symbols = [n for n in alone if n.op == "size" and len(terms) <= 2]
    for whole in (*symbols, *(parts if len(parts) == 1 else ())):
        rest = {atoms: n // common for atoms, n in terms.items() if atoms != (whole,)}
        found = M.from_polynomial({atoms: -alone.get(whole, 0) * n for atoms, n in rest.items()})
        if abs(alone.get(whole, 0)) == 1 and not _contains(found, whole):
            return whole, found
    return None
