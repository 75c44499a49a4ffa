"""Dimensions as digits: where in a value's dimensions the row of the batch and the token stand.

A dimension may be the token axis, the batch, both in one (`[B * T, C]`), or either joined with another
dimension of the model (`[B * H, T, D]`). `candidates` lists what a shape may mean, `follows` tells whether
index expressions read an operand at the same row and token as those of the result.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from attngraph.ir.language import E, Expr
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import Digits, M, is_example, ranges, recombined

Indices = tuple[Expr, ...]
Axes = tuple[Digits, ...]
"""For each dimension its digits, slowest first; empty if it contains neither row nor token."""


@dataclasses.dataclass(frozen=True)
class Space:
    """The two index variables of the analysis: `token` runs over the tokens of a sequence, `row` over the
    sequences of the batch (None where a model has no batch)."""

    token: Expr
    row: Expr | None

    @property
    def tokens(self) -> Expr:
        return self.token.args[0]

    @property
    def is_of_one_length(self) -> bool:
        """Whether the graph is of one number of tokens, an example of all others."""
        return is_example(self.tokens)

    @property
    def rows(self) -> Expr:
        return E.ONE if self.row is None else self.row.args[0]

    @property
    def both(self) -> frozenset[Expr]:
        return frozenset(v for v in (self.token, self.row) if v is not None)

    def counts(self, extent: Expr) -> bool:
        """Whether a size depends on how many tokens or sequences there are."""
        return any(map(self.is_count, E.walk(extent)))

    def is_count(self, node: Expr) -> bool:
        """Whether this is the number of tokens or of sequences."""
        return node.op == "size" and (node is self.tokens or node is self.rows)

    def counts_tokens(self, extent: Expr) -> bool:
        """Whether a size depends on how many tokens there are."""
        return self.tokens in E.walk(extent)

    def candidates(self, shape: Indices) -> Iterator[Axes]:
        """What the dimensions of a shape may stand for, the most likely first; at most one dimension holds
        the token and at most one the row."""
        options = [_options(self, place, extent) for place, extent in enumerate(shape)]
        for axes in itertools.product(*options):
            digits = [d for dim in axes for d in dim]
            if all(digits.count(v) <= 1 for v in self.both):
                yield axes

    def with_rest(self, place: int, extent: Expr, digits: Digits) -> list[Digits]:
        """`digits` as all of a dimension, or with one more digit (of another dimension) before or after."""
        product = M.mul(*(d.args[0] for d in digits))
        if product is extent:
            return [digits]
        rest = M.floordiv(extent, product)
        if M.mul(rest, product) is not extent or self.counts(rest) or E.is_const(rest, 0):
            return []
        own = E.var(f"own{place}", rest)
        found = [(*digits, own), (own, *digits)]
        return [*found, (digits[0], own, digits[1])] if len(digits) == 2 else found

    def indices(self, axes: Axes, shape: Indices) -> Indices:
        """The index of an element: digits joined where a dimension has them, a new variable elsewhere."""
        return tuple(
            recombined(digits) if digits else E.var(f"own{place}", extent)
            for place, (digits, extent) in enumerate(zip(axes, shape, strict=True))
        )

    def follows(self, axes: Axes, at: Indices) -> bool:
        """Whether elements `at` of a tensor with these axes belong to the same row and token as the
        result that is computed from them."""
        return all(self.follows_digits(digits, index) for digits, index in zip(axes, at, strict=True))

    def follows_digits(self, digits: Digits, index: Expr) -> bool:
        """The same for one dimension."""
        if len(digits) <= 1:
            return index is digits[0] if digits and digits[0] in self.both else not self.moves(index)
        below: Expr = E.ONE
        for number, digit in enumerate(reversed(digits)):
            part = M.floordiv(index, below)
            if number < len(digits) - 1:
                part = M.mod(part, digit.args[0])
            if part is not digit if digit in self.both else self.moves(part):
                return False
            below = M.mul(below, digit.args[0])
        return True

    def follows_rows(self, digits: Digits, index: Expr) -> bool:
        """The same for one dimension, of an index of a score program, where `b` is the row."""
        if self.row is None:
            return not digits
        return self.follows_digits(digits, M.substitute(index, {E.var("b"): self.row}))

    def moves(self, index: Expr) -> bool:
        """Whether an index changes with the row or the token, other than through data that it reads."""
        return any(n in self.both for n in outside_reads(index))

    def reach(self, index: Expr) -> tuple[int, int] | None:
        """How far from the token a place is at least and at most, later ones positive; None if not known."""
        low, high = ranges.bounds(ranges.polynomial(M.sub(index, self.token)))
        if low is None or high is None or not set(low) | set(high) <= {()}:
            return None
        return low.get((), 0), high.get((), 0)

    def place(self, axes: Axes, variable: Expr | None) -> int | None:
        """The dimension that holds the variable."""
        return next((place for place, digits in enumerate(axes) if variable in digits), None)


@functools.lru_cache(maxsize=1 << 12)
def _options(space: Space, place: int, extent: Expr) -> tuple[Digits, ...]:
    """What one dimension of this extent may stand for."""
    token, row, found = space.token, space.row, list[Digits]()
    if row is not None:
        found += space.with_rest(place, extent, (row, token))
        found += space.with_rest(place, extent, (token, row))
    found += space.with_rest(place, extent, (token,))
    if row is not None:
        found += space.with_rest(place, extent, (row,))
    return (*found, ())


def outside_reads(node: Expr) -> Iterator[Expr]:
    """The nodes of an expression without those in the indices of reads and in the extents of variables
    (but with the extents of summation variables)."""

    def parts(node: Expr) -> tuple[Expr, ...]:
        if node.op in E.BINDERS:
            return (node.args[0].args[0], node.args[1])
        return () if node.op in ("var", "read") else node.args

    return reached([node], parts)
