"""How large scores can be: all that are not minus infinity, and those that a finite fill replaced.

Intervals over the whole index space, from a bound of the dot product. A kernel may leave out keys that a
finite fill hides where the largest score of each row is far enough above `hidden_below`.

`torch.nan_to_num(scores)`, `torch.where(scores.isnan(), ...)` and `scores == -inf` before a mask is added ask
whether a product of queries and keys is a number. Results are promised for finite inputs and for scores
within the dtype's range, where it is one.
"""

import dataclasses
import functools
import math

from attngraph.ir.language import DOT, E, Expr, Keep, ScoreProgram, operation_of
from attngraph.meaning.algebra import M
from attngraph.meaning.algebra.intervals import EVERYTHING, Box, Interval, interval
from attngraph.meaning.masks.fold import Domain, added_to_score, fold


@dataclasses.dataclass(frozen=True)
class ScoreBounds:
    """`score` bounds all scores but those of minus infinity. `masked`: there may be such. `filled`: no score
    of a pair that a finite fill hides exceeds it."""

    score: Interval
    filled: float = -math.inf
    masked: bool = False


class _Intervals(Domain[None, ScoreBounds]):
    def __init__(self, dot: float, sizes: tuple[int, ...]) -> None:
        self.dot = (-dot, dot)
        self.everywhere = Box(*((0.0, math.inf),) * 4, sizes)
        self.shown = ScoreBounds(self.dot)

    def interval(self, formula: Expr, score: Interval) -> Interval:
        return interval(formula, self.everywhere, {"dot": self.dot, "s": score})

    def truth(self, predicate: Expr) -> None:
        return None

    def choose(self, kept: None, yes: ScoreBounds, no: ScoreBounds) -> ScoreBounds:
        score = min(yes.score[0], no.score[0]), max(yes.score[1], no.score[1])
        return ScoreBounds(score, max(yes.filled, no.filled), yes.masked or no.masked)

    def filled(self, state: ScoreBounds, keep: Keep) -> ScoreBounds:
        if keep.is_hard or keep.lowers:
            return ScoreBounds((math.inf, -math.inf), masked=True)
        stays = added_to_score(keep.fill) < math.inf
        score = self.interval(keep.fill, EVERYTHING if state.masked and not stays else state.score)
        return ScoreBounds(score, score[1], state.masked and stays)

    def computed(self, state: ScoreBounds, value: Expr) -> ScoreBounds:
        return ScoreBounds(self.interval(value, EVERYTHING if state.masked else state.score))

    def weighed(self, state: ScoreBounds) -> ScoreBounds:
        return state


@functools.lru_cache(maxsize=1 << 12)
def score_bounds(program: ScoreProgram, dot: float, sizes: tuple[int, ...] = ()) -> ScoreBounds:
    """Bounds of the program's scores where |dot| <= `dot`. Sizes that are not given may be anything."""
    return fold(program.statements, _Intervals(dot, sizes))


def hidden_below(program: ScoreProgram, dot: float, sizes: tuple[int, ...]) -> float:
    """A number that no score hidden by a finite fill exceeds, where |dot| <= `dot`. Infinite where
    no bound is known."""
    if not math.isfinite(dot):
        return math.inf
    # Rounded up to a power of 2**(1/4), so that calls share cached bounds.
    return score_bounds(program, 2.0 ** (math.ceil(4 * math.log2(max(dot, 1e-30))) / 4), sizes).filled


_STAYS_FINITE = ("add", "mul", "neg", "min", "max", "abs")
"""Besides bounded functions."""


def with_finite_dots(score: Expr) -> Expr:
    """The score with every question answered whether a number that is computed from the dot is NaN or
    infinite. Numbers that are read from tensors are left in doubt: a mask may hold minus infinity."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "var":
            return current
        built = M.construct(current, args)
        if built.op == "isnan" and _is_finite(built.args[0]):
            return E.FALSE
        if built.op in ("eq", "le") and _compares_with_infinity(built):
            below = built.op == "le" and (built.args[0] is E.NEG_INF or built.args[1] is E.INF)
            return E.TRUE if below else E.FALSE
        return built

    return E.rebuild(score, replace) if any(n is DOT for n in E.walk(score)) else score


def _compares_with_infinity(comparison: Expr) -> bool:
    left, right = comparison.args
    number, other = (left, right) if right in (E.INF, E.NEG_INF) else (right, left)
    return other in (E.INF, E.NEG_INF) and _is_finite(number)


def _is_finite(node: Expr) -> bool:
    """Whether a formula is a number wherever the dot, places and sizes are."""
    if node.op == "const":
        return node is not E.NAN and math.isfinite(node.value)
    if node.op == "where":
        return all(_is_finite(a) for a in node.args[1:])
    row = operation_of(node.op)
    if node.op in _STAYS_FINITE or (row is not None and row.limits is not None):
        return all(_is_finite(a) for a in node.args)
    return node is DOT or node.op in ("var", "size") or node.kind == "int"
