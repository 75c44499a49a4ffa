"""What the statements of a score program do to masked pairs of a query and a key: one fold, many domains.

A mask hides a pair: its score becomes minus infinity, so its weight is zero. A later statement may undo that.
The rules of this stand here and nowhere else:

- `keep` without a fill hides a pair where its predicate is false.
- A finite fill hides a pair only beside larger scores, so it counts only in a `soft` domain.
- Any other fill makes a hidden pair visible, unless it is the score plus a number. A number above zero makes
  a pair visible that only a finite fill hid.
- A score that is computed anew may be anything, whatever was hidden before.
- A changed weight may be anything, unless a weight of zero stays zero (`keeps_zero`).
- A sink changes no pair.

`fold` applies them to what a domain knows of the pairs: a truth value for each tile of a grid (`tiles.py`),
a predicate (`causal.py`), bounds of scores (`score_bounds.py`), what is possible for each pair
(`visible.py`), or C code that finds it out in a call (`codegen/cpu/source.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import SCORE, WEIGHT, Keep, Score, Statement, Weight

UNDERFLOWS = 1000.0
"""The exponential of minus this is zero in float64 too (from 746 on), and that of this is infinite. So a
constant of at most minus this that a model puts in place of a score is read as the fill of a mask: it decides
how the program is written, not what it computes."""
HIDES = 1e4
"""A fill of at most minus this is taken to hide a key from every query that sees another key, whatever the
scores are (`is_low`). More than `UNDERFLOWS`, because a decoder relies on it and never looks at the key: the
fill must stay below the other scores by 746 even where these are thousands. Models use -1e4 and less. Kernels
rely on neither number: they compare a fill with the scores of the call (`codegen/cpu/soft.py`)."""

Truth = TypeVar("Truth")
State = TypeVar("State")


class Domain(Protocol[Truth, State]):
    """What is known of pairs: `Truth` of a predicate, `State` of what statements made of the pairs."""

    shown: State
    """Before any statement: no pair is hidden."""

    def truth(self, predicate: Expr) -> Truth: ...

    def choose(self, kept: Truth, yes: State, no: State) -> State:
        """Pairs are as in `yes` where a predicate is true, as in `no` where it is false."""

    def filled(self, state: State, keep: Keep) -> State:
        """Every score is replaced by the fill of a `keep`, a formula of the score."""

    def computed(self, state: State, value: Expr) -> State:
        """Every score is computed anew."""

    def weighed(self, state: State) -> State:
        """Every weight is computed anew, by a formula that may not keep zero."""


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


class HiddenPairs(Domain[Truth, State], Protocol):
    """Domains that know only which pairs are certainly hidden.

    `hidden` is the state in which all are. `soft`: pairs behind finite fills count as hidden too.
    """

    hidden: State
    soft: bool

    def hides(self, fill: Expr) -> bool:
        """Whether a finite fill is low enough to count in a soft domain."""
        return True

    def filled(self, state: State, keep: Keep) -> State:
        if keep.is_hard or (self.soft and self.hides(keep.fill)):
            return self.hidden
        added = _added_to_score(keep.fill)
        stays = added is not None and (added <= 0 if self.soft else added < math.inf)
        return state if stays else self.shown

    def computed(self, state: State, value: Expr) -> State:
        return self.shown

    def weighed(self, state: State) -> State:
        return self.shown


def _added_to_score(fill: Expr) -> float | None:
    """The number c of a fill `s + c`; None where it has another form."""
    if fill is SCORE:
        return 0.0
    if fill.op not in ("add", "sub") or fill.args[0] is not SCORE or fill.args[1].op != "const":
        return None
    number = fill.args[1].value
    return None if number == "nan" else float(number if fill.op == "add" else -number)


def keeps_minus_infinity(fill: Expr) -> bool:
    """Whether a fill leaves a score of minus infinity as it is: the score plus anything but infinity."""
    added = _added_to_score(fill)
    return added is not None and added < math.inf


def is_low(fill: Expr) -> bool:
    """Whether a fill counts as hiding whatever the scores are (`HIDES`): a number, or the score less one."""
    number = fill.value if fill.op == "const" else _added_to_score(fill)
    return number is not None and number != "nan" and bool(number <= -HIDES)


def keeps_zero(weight: Expr) -> bool:
    """Whether a changed weight is zero where the weight was, and a number where it was one: p times or over
    a number, a selection between that and zero, or zero in place of NaN."""
    if weight is WEIGHT or E.is_const(weight, 0):
        return True
    if weight.op in ("mul", "div"):
        a, b = weight.args
        number, other = (a, b) if a.op == "const" and weight.op == "mul" else (b, a)
        usable = number.op == "const" and number.value != "nan" and math.isfinite(number.value)
        return usable and number.value != 0 and keeps_zero(other)
    if weight.op == "where":
        return all(keeps_zero(branch) for branch in weight.args[1:])
    return False
