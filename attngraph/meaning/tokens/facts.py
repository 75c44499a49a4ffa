"""What is known about a value of a graph: how it depends on the tokens, and where they stand in it.

A dimension may be the token axis, the batch, both in one (`[B * T, C]`), or either joined with another
dimension of the model (`[B * H, T, D]`). `candidates` lists what a shape may mean, `follows` tells whether
index expressions read an operand at the same row and token as those of the result. The facts themselves are
found by `meaning/tokens/tokens.py`.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator

from torch import fx

from attngraph.ir.language import E, Expr
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import Digits, M, is_example, ranges, recombined, taken_apart
from attngraph.meaning.element import Meaning
from attngraph.meaning.masks.causal import Causality
from attngraph.meaning.tokens.numbers import OfSizes

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

    def numbered(self, axes: Axes, own: Indices, token: int) -> Indices:
        """The index of an element of the token of this number, whose other places are `own`."""
        return tuple(
            E.const(token) if self.token in digits else (self.row or E.ZERO) if digits else variable
            for variable, digits in zip(own, axes, strict=True)
        )

    def follows(self, axes: Axes, at: Indices) -> bool:
        """Whether elements `at` of a tensor with these axes belong to the same row and token as the
        result that is computed from them."""
        return all(self.follows_digits(digits, index) for digits, index in zip(axes, at, strict=True))

    def follows_digits(self, digits: Digits, index: Expr) -> bool:
        """The same for one dimension."""
        if len(digits) <= 1:
            return index is digits[0] if digits and digits[0] in self.both else not self.moves(index)
        apart = taken_apart(index, digits).items()
        return all(part is digit if digit in self.both else not self.moves(part) for digit, part in apart)

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
    token, row = space.token, space.row
    kinds: list[Digits] = [(token,)] if row is None else [(row, token), (token, row), (token,), (row,)]
    return *(found for digits in kinds for found in space.with_rest(place, extent, digits)), ()


def own_variables(shape: Indices) -> Indices:
    """A variable for each dimension of a value."""
    return tuple(E.var(f"own{dim}", extent) for dim, extent in enumerate(shape))


def outside_reads(node: Expr) -> Iterator[Expr]:
    """The nodes of an expression without those in the indices of reads and in the extents of variables
    (but with the extents of summation variables)."""

    def parts(node: Expr) -> tuple[Expr, ...]:
        if node.op in E.BINDERS:
            return (node.args[0].args[0], node.args[1])
        return () if node.op in ("var", "read") else node.args

    return reached([node], parts)


ENTRIES = "entries"
"""The key in the `meta` of numbers that choose rows of a table whose rows are divided among ranks: of how
many."""


class Kind(enum.Enum):
    """How a value depends on the tokens."""

    FIXED = "fixed"
    POSITION = "position"
    TOKEN = "token-wise"
    ATTENTION = "attention"
    SCAN = "scan"
    MIXING = "mixing"


class Scan:
    """How a value follows from earlier tokens: one class for each way, beside what finds it. What makes it a
    step of a decoder stands in `passes/insert_kv_cache/insert.py`, one function for each class."""

    operands: tuple[fx.Node, ...] = ()
    """Values that are kept of earlier tokens."""
    latest: int | None = None
    """Of how many of the latest tokens they are kept, the token itself included; None: of all."""

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that it is computed from."""
        raise NotImplementedError

    @property
    def reason(self) -> str:
        """What the value is, in words: "the last 4 tokens of %x"."""
        raise NotImplementedError


Finder = Callable[[fx.Node, Axes], Scan | None]
"""Finds values that follow from earlier tokens in one way: how a value with these axes does, or None."""


def read_by(*formulas: Expr) -> tuple[fx.Node, ...]:
    """The values of which formulas read elements."""
    return tuple({n.value: None for f in formulas for n in E.reads(f)})


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known about one value.

    `axes` says which of its dimensions hold the row and the token; `reason` why it is of its kind.
    `formula`: what one element at those axes equals, for a position value whose operation does not compute
    it from positions token by token. `causality`: what an attention's mask lets a token see. `scan`: how a
    value of kind SCAN follows from earlier tokens.
    """

    kind: Kind
    axes: Axes = ()
    reason: str = ""
    formula: Expr | None = None
    causality: Causality | None = None
    scan: Scan | None = None

    @property
    def is_of_token(self) -> bool:
        """Whether it has a value for each token that follows from tokens, not from their places alone."""
        return self.kind in (Kind.TOKEN, Kind.ATTENTION, Kind.SCAN)

    @property
    def is_shared(self) -> bool:
        """Whether all tokens and sequences share the value."""
        return self.kind is Kind.FIXED and not any(self.axes)

    def describe(self, space: Space) -> str:
        """For a dump: the kind, the token's dimension, the reason."""
        place = space.place(self.axes, space.token)
        shown = self.kind.value + (f"({place})" if place is not None and self.kind is not Kind.FIXED else "")
        return f"{shown}: {self.reason}" if self.reason else shown


class Facts(dict[fx.Node, Fact]):
    """What is known of the values of one graph. It grows while they are looked at, operands first."""

    def __init__(self, meaning: Meaning, space: Space) -> None:
        super().__init__()
        self.meaning, self.space, self.of_sizes = meaning, space, OfSizes()

    def known(self, node: fx.Node) -> Fact | None:
        """What is known of a value that does not mix tokens; None for any other."""
        fact = self.get(node)
        return None if fact is None or fact.kind is Kind.MIXING else fact

    def mixes(self, node: fx.Node) -> bool:
        return self[node].kind is Kind.MIXING


def place_text(index: Expr, tokens: Expr) -> str:
    """An index in words of a reader: `n` is how many tokens there are."""
    named = M.substitute(index, {tokens: E.var("n")})
    terms = E.parts(named, "add")
    text = " + ".join(sorted(map(repr, terms), key=lambda term: term.startswith("-")))
    return text.replace("+ -1 * ", "- ").replace("+ -", "- ")


def read_token(index: Expr, tokens: Expr) -> str:
    """Which token is read at an index, in words. `tokens`: how many there are."""
    from_end = M.sub(index, tokens)
    if index.op == "const" or from_end.op == "const":
        return f"token {index.value if index.op == 'const' else from_end.value} is read"
    if any(n.op == "read" for n in E.walk(index)):
        return "data choose the token that is read"
    return "every token is read" if index.free else "a token is read whose place follows from sizes"
