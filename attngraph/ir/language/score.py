"""Score programs: the small language inside an attention node.

An attention node computes, for every batch b, head h, query q and key k,

    dot  = sum over d of Q[b,h,q,d] * K[b,h',k,d]        h' = h // (Hq // Hkv)
    s    = the score program's statements applied to dot
    p    = exp(s) / (sum over k of exp(s) + exp(sink))
    out  = sum over k of p * V[b,h',k,:]

This file defines the language of the two middle lines: statements, printing, and when a program is well
formed. `ir/language/parser.py` parses the text form, `ir/language/evaluate.py` defines its meaning in plain
PyTorch, docs/score-programs.md is the page for users. Programs print and parse back to the identical object.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr, format_expr

INDICES = ("b", "h", "q", "k")
"""Batch, query head, query position, key position."""

DOT = E.make("dot")
SCORE = E.make("s")
WEIGHT = E.make("p")


IN_ORDER = "in order"
"""The line of a program whose results are the same numbers, bit for bit, whatever rows and tokens they are
computed with: sums have one order, which follows from positions and from the model's sizes alone."""


class ProgramError(ValueError):
    """A score program that is not well formed: says where, what was found and what was expected."""


MODERATE = 2.0**16
"""The largest factor that changes places with a sum of products."""


@dataclasses.dataclass(frozen=True)
class Score:
    """`s = value`: the score becomes `value`."""

    value: Expr


@dataclasses.dataclass(frozen=True)
class Keep:
    """`keep predicate [else fill]`: the score becomes `fill` (minus infinity unless given) where
    the predicate is false."""

    predicate: Expr
    fill: Expr = E.NEG_INF

    @property
    def lowers(self) -> bool:
        """Whether minus infinity is added to hidden scores: as if it replaced them, but NaN stays NaN."""
        return self.fill.op == "sub" and self.fill.args[0] is SCORE and self.fill.args[1] is E.INF

    @property
    def is_hard(self) -> bool:
        """Whether hidden scores get weight zero, whatever the other scores are."""
        return self.fill is E.NEG_INF


@dataclasses.dataclass(frozen=True)
class Sink:
    """`sink value`: exp(value) is added to the softmax's denominator, once for each row."""

    value: Expr


@dataclasses.dataclass(frozen=True)
class Weight:
    """`p = value`: the normalised weight becomes `value`, which may depend on the dot."""

    value: Expr


Statement = Score | Keep | Sink | Weight


def formulas(statement: Statement) -> tuple[Expr, ...]:
    """The expressions of a statement."""
    return (statement.predicate, statement.fill) if isinstance(statement, Keep) else (statement.value,)


@dataclasses.dataclass(frozen=True)
class ScoreProgram:
    """An immutable sequence of statements. Equal programs print alike; `str()` is the text form.

    Raises:
        ProgramError: a statement uses a name that is not defined there.
    """

    statements: tuple[Statement, ...]
    in_order: bool = False

    def __post_init__(self) -> None:
        sinks = [s for s in self.statements if isinstance(s, Sink)]
        if len(sinks) > 1:
            raise ProgramError(
                f"`{format_statement(sinks[1])}` is a second sink; a row has one. Join them into one value."
            )
        seen_weight = False
        for statement in self.statements:
            if seen_weight and not isinstance(statement, Weight):
                raise ProgramError(
                    f"`{format_statement(statement)}` stands after `p = ...`: scores and masks come "
                    "before the softmax, weights after it. Move it up."
                )
            seen_weight |= isinstance(statement, Weight)
            _check_names(statement)

    @functools.cached_property
    def text(self) -> str:
        lines = [format_statement(s) for s in self.statements]
        return "\n".join([*lines, *([IN_ORDER] if self.in_order else [])])

    def __str__(self) -> str:
        return self.text

    @functools.cached_property
    def expressions(self) -> tuple[Expr, ...]:
        return tuple(formula for statement in self.statements for formula in formulas(statement))

    @functools.cached_property
    def reads(self) -> dict[int, int]:
        """The number of indices of each read `rN`, by N."""
        nodes = [n for e in self.expressions for n in E.walk(e) if n.op == "read"]
        return {n.value: len(n.args) for n in sorted(nodes, key=lambda n: int(n.value))}

    @functools.cached_property
    def places(self) -> tuple[tuple[Expr, int, Expr], ...]:
        """Every index of every read: the read, the axis and the index."""
        nodes = dict.fromkeys(n for e in self.expressions for n in E.walk(e) if n.op == "read")
        return tuple((node, axis, index) for node in nodes for axis, index in enumerate(node.args))

    @functools.cached_property
    def sizes(self) -> int:
        """How many sizes `n0, n1, ...` the program names (one more than the highest)."""
        nodes = [n for e in self.expressions for n in E.walk(e) if n.op == "size"]
        return max((int(n.value[1:]) + 1 for n in nodes), default=0)

    @functools.cached_property
    def scale(self) -> float | None:
        """The factor c if scores before masking are just c * dot, so that q may be multiplied by it, else
        None."""
        statements = self.statements
        later = self.expressions
        value = DOT
        if statements and isinstance(statements[0], Score):
            value, later = statements[0].value, later[1:]
        if any(isinstance(s, Score) for s in statements[1:]) or any(
            n is DOT for e in later for n in E.walk(e)
        ):
            return None
        if value is DOT:
            return 1.0
        if value.op in ("mul", "div") and DOT in value.args:
            other = value.args[1 if value.args[0] is DOT else 0]
            if other.op == "const" and (value.op == "mul" or value.args[0] is DOT):
                found = float(other.value)
                found = found if value.op == "mul" else 1.0 / found if found else 0.0
                return found if is_moderate(found) else None
        return None

    @functools.cached_property
    def without_scale(self) -> "ScoreProgram":
        """The program for a q already multiplied by `scale`; unchanged if there is no scale."""
        if self.scale is None or not self.statements or not isinstance(self.statements[0], Score):
            return self
        return dataclasses.replace(self, statements=self.statements[1:])

    @property
    def keeps(self) -> tuple[Keep, ...]:
        return tuple(s for s in self.statements if isinstance(s, Keep))

    @functools.cached_property
    def changes_weights(self) -> bool:
        """Whether the program changes the weights after the softmax."""
        return any(isinstance(s, Weight) for s in self.statements)

    @property
    def sink(self) -> Expr | None:
        return next((s.value for s in self.statements if isinstance(s, Sink)), None)

    def mapped(self, change: Callable[[Expr], Expr]) -> "ScoreProgram":
        """The program with each of its formulas changed."""
        changed = tuple(type(s)(*map(change, formulas(s))) for s in self.statements)
        return dataclasses.replace(self, statements=changed)

    def renumbered(self) -> "tuple[ScoreProgram, tuple[int, ...]]":
        """The program with the tensors that it reads numbered from 0, and which of them these are."""
        used = {number: place for place, number in enumerate(self.reads)}

        def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
            return E.read(used[node.value], args, node.kind) if node.op == "read" else E.with_args(node, args)

        return self.mapped(lambda formula: E.rebuild(formula, leaf)), tuple(used)


def is_moderate(factor: float) -> bool:
    """Whether a product may be multiplied by this before it is added up as well as after, or the other way
    round: numbers move by a small part of float32's range. A model that multiplies by others has a reason to
    do it where it does it."""
    return 1 / MODERATE <= abs(factor) <= MODERATE


def reindexed(program: ScoreProgram, name: str, value: Expr, kept: Collection[int] = ()) -> ScoreProgram:
    """The program with a formula in the place of an index, other than in reads of the tensors in `kept`."""
    variable = index(name)

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node is variable:
            return value
        return node if node.op == "read" and node.value in kept else E.with_args(node, args)

    made = program.mapped(lambda formula: E.rebuild(formula, leaf))
    return program if made == program else made


def index(name: str) -> Expr:
    """The index variable `b`, `h`, `q` or `k` of a score program."""
    return E.var(name)


NAMES: dict[type[Statement], frozenset[str]] = {
    Score: frozenset({"dot", "s", *INDICES}),
    Keep: frozenset({"dot", "s", *INDICES}),
    Sink: frozenset({"b", "h", "q"}),
    Weight: frozenset({"p", "dot", *INDICES}),
}
"""The names defined in each kind of statement, besides sizes and reads."""


def _check_names(statement: Statement) -> None:
    allowed = NAMES[type(statement)]
    for node in (n for formula in formulas(statement) for n in E.walk(formula)):
        if node.op in E.BINDERS or (node.op == "read" and not isinstance(node.value, int)):
            raise ProgramError(f"`{format_expr(node)}` is not part of the score language.")
        name = node.value if node.op == "var" else node.op if node.op in ("dot", "s", "p") else None
        if name is not None and name not in allowed:
            raise ProgramError(
                f"`{name}` has no meaning in `{format_statement(statement)}`; "
                f"allowed there: {', '.join(sorted(allowed))}."
            )


def format_statement(statement: Statement) -> str:
    match statement:
        case Score(value):
            return f"s = {format_expr(value)}"
        case Keep(predicate, fill):
            tail = "" if fill is E.NEG_INF else f" else {format_expr(fill)}"
            return f"keep {format_expr(predicate)}{tail}"
        case Sink(value):
            return f"sink {format_expr(value)}"
        case Weight(value):
            return f"p = {format_expr(value)}"
