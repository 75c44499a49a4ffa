"""What the statements of a score program do to masked pairs of a query and a key: one fold, several domains.

A mask hides a pair: its score becomes minus infinity, so its weight is zero. A later statement may undo that:

- `keep` without a fill hides a pair where its predicate is false.
- A finite fill hides a pair only beside larger scores, so it counts as hiding only if the caller says so.
- Any other fill makes a hidden pair visible, unless it is the score plus a number. A number above zero makes
  a pair visible that only a finite fill hid.
- A score that is computed anew may be anything, whatever was hidden before.
- A changed weight may be anything, unless a weight of zero stays zero (`keeps_zero`).
- A sink changes no pair.

`fold` goes through the statements with what a domain knows of the pairs. `seen` makes one predicate of them,
which is bounded for tiles, proved for causality, and evaluated by C in each call. The other domains are
bounds of scores (`score_bounds.py`) and what may become of each pair (`visible.py`).
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from attngraph.ir.language import E, Expr, operation, operation_of
from attngraph.ir.language.score import SCORE, WEIGHT, Keep, Score, Statement, Weight

UNDERFLOWS = 1000.0
"""exp(-UNDERFLOWS) is zero even in float64 (as from exp(-746) on), and exp(UNDERFLOWS) is infinite. So a
constant of at most -UNDERFLOWS that a model puts in place of a score is read as the fill of a mask: it
decides how the program is written, not what it computes."""
HIDES = 1e4
"""A fill of at most minus this is taken to hide a key from every query that sees another key, whatever the
scores are. More than `UNDERFLOWS`, because a decoder relies on it and never looks at the key: the fill must
stay 746 below the other scores, even where these are thousands. Models use -1e4 and less. Kernels rely on
neither number: they compare a fill with the scores of the call (`codegen/cpu/soft.py`)."""

Truth = TypeVar("Truth")
State = TypeVar("State")


class Domain(Protocol[Truth, State]):
    """What is known of pairs: the `Truth` of a predicate, and the `State` after some statements; `shown` is
    the state before the first one."""

    shown: State

    def truth(self, predicate: Expr) -> Truth: ...

    def choose(self, kept: Truth, yes: State, no: State) -> State:
        """Pairs are as in `yes` where a predicate is true, as in `no` where it is false."""

    def filled(self, state: State, keep: Keep) -> State:
        """Every score is replaced by the fill of a `keep`, a formula of the score."""

    def computed(self, state: State, value: Expr) -> State:
        """Every score is computed anew."""
        return self.shown

    def weighed(self, state: State) -> State:
        """Every weight is computed anew, by a formula that may not keep zero."""
        return self.shown


def fold(statements: Iterable[Statement], domain: Domain[Truth, State]) -> State:
    """What is known of pairs after all statements."""
    state = domain.shown
    for statement in statements:
        match statement:
            case Keep(predicate):
                state = domain.choose(domain.truth(predicate), state, domain.filled(state, statement))
            case Score(value):
                state = domain.computed(state, value)
            case Weight(value) if not keeps_zero(value):
                state = domain.weighed(state)
    return state


def seen(statements: Iterable[Statement], hides: Callable[[Expr], bool] | None = None) -> Expr:
    """A predicate that is true wherever a pair may have weight, by the masks of the program.

    Args:
        hides: which finite fills hide. None: none does, so what is not seen has a score of minus infinity.
    """
    return fold(statements, _Predicates(hides))


class _Predicates(Domain[Expr, Expr]):
    """Where pairs are seen. Nothing is simplified, because `s` may have another value in each statement."""

    shown = E.TRUE

    def __init__(self, hides: Callable[[Expr], bool] | None) -> None:
        self.hides = hides
        self.masked = self.turned = False
        """A statement before has masked pairs; one after that may have turned minus infinity into plus."""

    def truth(self, predicate: Expr) -> Expr:
        return predicate

    def choose(self, kept: Expr, yes: Expr, no: Expr) -> Expr:
        if no is yes:
            return yes
        if no is E.FALSE:
            return kept if yes is E.TRUE else operation("and", yes, kept)
        return operation("or", yes, operation("not", kept))

    def filled(self, state: Expr, keep: Keep) -> Expr:
        added = added_to_score(keep.fill)
        is_relative = keep.fill.op != "const" and added < math.inf
        by_fill = self.hides is not None and self.hides(keep.fill) and not (is_relative and self.turned)
        self.turned |= self.masked and keep.fill.op != "const" and not is_relative
        self.masked = True
        if keep.is_hard or by_fill:
            return E.FALSE
        return state if (added <= 0 if self.hides else added < math.inf) else E.TRUE

    def computed(self, state: Expr, value: Expr) -> Expr:
        self.turned |= self.masked
        return self.shown


def any_fill(fill: Expr) -> bool:
    """For `seen`: every finite fill hides. The caller must show that (`score_bounds.hidden_below`)."""
    return True


def low_fill(fill: Expr) -> bool:
    """For `seen`: a fill hides that is a number, or the score plus one, of at most minus `HIDES`."""
    return _level(fill) <= -HIDES


def hiding_fills(statements: Iterable[Statement]) -> list[Callable[[Expr], bool]]:
    """For `seen`, which finite fills hide: first all low ones; then, for a query that these leave no key, the
    ones that stay `HIDES` below all others together (they may add up), which such a query sees."""
    levels = [_level(s.fill) for s in statements if isinstance(s, Keep) and not s.is_hard]
    low = [level for level in levels if level <= -HIDES]
    above = {limit: sum(level for level in low if level > limit) for limit in sorted(set(low), reverse=True)}
    limits = [-HIDES, *(limit for limit, others in above.items() if others and others - limit >= HIDES)]
    return [lambda fill, limit=limit: _level(fill) <= limit for limit in limits]  # type: ignore[misc]


def highest_fill(statements: Iterable[Statement], hides: Callable[[Expr], bool]) -> float:
    """The largest of the numbers that hide."""
    return max(_level(s.fill) for s in statements if isinstance(s, Keep) and not s.is_hard and hides(s.fill))


def _level(fill: Expr) -> float:
    """The number of a fill that is one, or the score plus one; infinity for others, and for NaN."""
    if fill is E.NAN:
        return math.inf
    return float(fill.value) if fill.op == "const" else added_to_score(fill)


def added_to_score(fill: Expr) -> float:
    """The number c of a fill `s + c`; infinity for any other fill, which may turn minus infinity into any
    score."""
    if fill is SCORE:
        return 0.0
    is_sum = fill.op in ("add", "sub") and fill.args[0] is SCORE
    if not is_sum or fill.args[1].op != "const" or fill.args[1] is E.NAN:
        return math.inf
    return float(fill.args[1].value if fill.op == "add" else -fill.args[1].value)


class OfData(NamedTuple):
    """What a program reads that follows from tokens; what of it they may make as low as a fill; and for what
    they choose among numbers."""

    reads: frozenset[int] = frozenset()
    low: frozenset[int] = frozenset()
    chosen: frozenset[int] = frozenset()


def lowered(value: Expr, data: OfData) -> list[Expr]:
    """What the formula of a score reads that makes it as low as a fill, or may: by a large number, or by a
    steep function of what data choose."""
    reads = E.reads(value)
    large = any(n.op == "const" and n is not E.NAN and abs(float(n.value)) >= HIDES for n in E.walk(value))
    of_data = data.reads if large or chooses(value, lambda n: n.value in data.chosen) else data.low
    return [n for n in reads if n.value in of_data]


def chooses(value: Expr, is_chosen: Callable[[Expr], bool]) -> bool:
    """Whether a steep function in a formula is given what data choose: by a condition, or read so."""

    def is_choice(n: Expr) -> bool:
        by_data = n.op == "where" and bool(E.reads(n.args[0]))
        return by_data or n.op in CHOOSES or (n.op == "read" and is_chosen(n))

    return any(is_choice(n) for f in E.walk(value) if f.op in STEEP for n in E.walk(f.args[-1]))


STEEP = frozenset({
    "div", "recip", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "rsqrt",
})  # fmt: skip
"""Functions whose results may be far below zero, or far above, where what they are given is small."""
STEEP_OPS = STEEP | {"reciprocal", "logit"}
"""The same of torch."""
CHOOSES = frozenset({"relu", "sign", "sgn", "heaviside", "floor", "round", "ceil", "trunc", "threshold"})
"""Functions that have the same few numbers as results of many."""


def is_of_row(value: Expr) -> bool:
    """Whether it is the same for all keys of a query."""
    return not any(n.op in ("dot", "s", "p") or (n.op == "var" and n.value == "k") for n in E.walk(value))


def _is_bounded(factor: Expr) -> bool:
    """Whether it is a function that is bounded, and a number at infinity too."""
    row = operation_of(factor.op)
    return row is not None and row.interval == "rising" and row.limits is not None


def keeps_zero(weight: Expr) -> bool:
    """Whether a changed weight is zero where the weight was zero, and NaN only where the weight was: p
    negated, or times or divided by a number, times a function of bounded values, a selection between that
    and zero, or zero in place of NaN. Or p times what is the same for all keys: where that is infinite, the
    row is not finite whichever keys are looked at."""
    if weight is WEIGHT or E.is_const(weight, 0):
        return True
    if weight.op == "neg":
        return keeps_zero(weight.args[0])
    if weight.op == "mul" and any(map(_is_bounded, weight.args)):
        return any(map(keeps_zero, weight.args))
    if weight.op in ("mul", "div"):
        a, b = weight.args
        number, other = (a, b) if weight.op == "mul" and is_of_row(a) else (b, a)
        if number.op != "const":
            return weight.op == "mul" and is_of_row(number) and keeps_zero(other)
        usable = number.op == "const" and number.value != "nan" and math.isfinite(number.value)
        return usable and number.value != 0 and keeps_zero(other)
    if weight.op == "where":
        return all(keeps_zero(branch) for branch in weight.args[1:])
    return False
