"""What is known about a value of a graph: how it depends on the tokens, and along which dimensions.

The facts themselves are found by `meaning/tokens/tokens.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar

import torch
from torch import fx

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
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


@dataclasses.dataclass(frozen=True)
class Window:
    """A value that is computed from the last tokens of others.

    `width`: of how many, the token's own included. `operands`: the values that are read at earlier tokens.
    `region`: the operations between them and the value, in the graph's order. `formula`: what an element
    equals in terms of the operands; None where the region contains a convolution, which is better run as it
    is (its operand is then zero before the first token).
    """

    width: int
    operands: tuple[fx.Node, ...]
    region: tuple[fx.Node, ...]
    formula: Expr | None

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that it is computed from."""
        if self.formula is not None:
            return _read_by(self.formula)
        return _read_in(self.region)

    @property
    def source(self) -> str:
        """The operands by name."""
        return " and ".join(f"%{n.name}" for n in self.operands)


@dataclasses.dataclass(frozen=True)
class RunningSum:
    """A value that is read from what is carried from token to token.

        S_t = decay_t * S_(t-1) + sum of left_t (right_t . S_(t-1)) + write_t
        out_t = read_t . S_t   (not `inclusive`: read_t . S_(t-1))

    All are formulas of one token; `over`: the variables that read and write are summed over, and (left,
    right) of `across`.
    """

    read: Expr
    write: Expr
    decay: Expr
    over: tuple[Expr, ...]
    inclusive: bool
    across: tuple[tuple[Expr, Expr], ...] = ()

    @property
    def formulas(self) -> tuple[Expr, ...]:
        """All of them."""
        return self.read, self.write, self.decay, *(e for pair in self.across for e in pair)


@dataclasses.dataclass(frozen=True)
class Sums:
    """A value that is a sum of running sums and of a formula of its own token, `rest`.

    `variables`: those of the value's dimensions besides row and token. `through`: values that are known token
    by token, but were followed to what they are sums of: the difference of two sums is a sum of what lies
    between, and is not computed by subtracting.
    """

    sums: tuple[RunningSum, ...]
    rest: Expr
    variables: tuple[Expr, ...]
    through: frozenset[fx.Node]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that it is computed from."""
        return _read_by(*self.formulas)

    @property
    def formulas(self) -> tuple[Expr, ...]:
        """All of them."""
        return self.rest, *(e for s in self.sums for e in s.formulas)

    operands: ClassVar[tuple[fx.Node, ...]] = ()
    """Values that are kept of earlier tokens: none."""


@dataclasses.dataclass(frozen=True)
class History:
    """A value that is computed from all earlier tokens of others, by the model's own operations.

    `operands`: the values that are read at earlier tokens. `region`: the operations between them and the
    value, in the graph's order.
    """

    operands: tuple[fx.Node, ...]
    region: tuple[fx.Node, ...]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that it is computed from."""
        return _read_in(self.region)


def _read_in(region: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    return tuple({n: None for step in region for n in step.all_input_nodes if n not in region})


@dataclasses.dataclass(frozen=True)
class RunningFold:
    """A value that folds `element` of all tokens up to its own: `how` is one of
    `ir/ops/running_fold.py`'s. `variables`: those of its dimensions besides row and token."""

    how: str
    element: Expr
    variables: tuple[Expr, ...]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that it is computed from."""
        return _read_by(self.element)

    operands: ClassVar[tuple[fx.Node, ...]] = ()
    """Values that are kept of earlier tokens: none."""


@dataclasses.dataclass(frozen=True)
class Handed:
    """A value that one step of a loop hands to the next: the shape and dtype of one row's."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class TokenLoop:
    """A value that is computed token after token: each step takes what the one before handed on.

    `program`: a step program (`ir/language/step_program.py`). `taken`: an element of each value of the token
    that it takes, with the variables of its dimensions besides the row, and its dtype. `shared`: values that
    all tokens share. `handed`: what is handed on. `result`: the place in the program's first result, besides
    the row's, of the element at `variables`.
    """

    program: str
    taken: tuple[tuple[Expr, tuple[Expr, ...], torch.dtype], ...]
    shared: tuple[fx.Node, ...]
    handed: tuple[Handed, ...]
    result: tuple[Expr, ...]
    variables: tuple[Expr, ...]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that it is computed from."""
        return (*_read_by(*(element for element, _, _ in self.taken)), *self.shared)

    operands: ClassVar[tuple[fx.Node, ...]] = ()
    """Values that are kept of earlier tokens: none."""


def _read_by(*formulas: Expr) -> tuple[fx.Node, ...]:
    return tuple({n.value: None for f in formulas for n in E.walk(f) if n.op == "read"})


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
    scan: Window | Sums | RunningFold | TokenLoop | History | None = None

    def describe(self, space: Space) -> str:
        """For a dump: the kind, the token's dimension, the reason."""
        place = space.place(self.axes, space.token)
        shown = self.kind.value + (f"({place})" if place is not None and self.kind is not Kind.FIXED else "")
        return f"{shown}: {self.reason}" if self.reason else shown


def place_text(index: Expr, tokens: Expr) -> str:
    """An index in words of a reader: `n` is how many tokens there are."""
    named = M.substitute(index, {tokens: E.var("n")})
    terms = named.args if named.op == "add" else (named,)
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
