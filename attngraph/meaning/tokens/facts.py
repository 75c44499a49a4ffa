"""What is known about a value of a graph: how it depends on the tokens, and along which dimensions.

The facts themselves are found by `meaning/tokens/tokens.py`.
"""

import dataclasses
import enum
from typing import Protocol

from torch import fx

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.masks.causal import Causality
from attngraph.meaning.tokens.axes import Axes, Space

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


class Finder(Protocol):
    """Finds values of one graph that follow from earlier tokens in one way."""

    def __call__(self, node: fx.Node, axes: Axes) -> Scan | None:
        """How a value with these axes does, or None."""


def read_in(region: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """The values that operations are given."""
    return tuple({n: None for step in region for n in step.all_input_nodes if n not in region})


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

    def describe(self, space: Space) -> str:
        """For a dump: the kind, the token's dimension, the reason."""
        place = space.place(self.axes, space.token)
        shown = self.kind.value + (f"({place})" if place is not None and self.kind is not Kind.FIXED else "")
        return f"{shown}: {self.reason}" if self.reason else shown


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
