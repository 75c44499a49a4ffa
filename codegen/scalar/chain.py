"""A program's statements as lines, forwards and then back by the chain rule; each backend in its language.

Forwards, statements leave what their derivatives need: `before<n>`, the score before statement n, and
`kept<n>`. Backwards, `ds` is the gradient of a statement's result and becomes that of the score before it;
what goes to the dot past that score is added up in `of_dot`, what goes to the reads in `of_read<i>`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from attngraph.codegen.scalar.derivative import ZERO, derivative, formula_of, slopes
from attngraph.codegen.scalar.read_gradients import ReadGradient
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import DOT, SCORE, Keep, Score


class Chain(abc.ABC):
    """Writes the lines of one tile. `written`: the names of gradients that were given a value."""

    zero = "0.0"
    reads: Sequence[ReadGradient]
    written: set[str]

    @abc.abstractmethod
    def line(self, code: str) -> None:
        """Write a line."""

    @abc.abstractmethod
    def declare(self, name: str, code: str, is_truth: bool = False) -> None:
        """Write a line that gives a number, or a truth value, a new name."""

    @abc.abstractmethod
    def choose(self, condition: str, yes: str, no: str) -> str:
        """One of two values, as a factor."""

    @abc.abstractmethod
    def truth(self, predicate: Expr) -> str: ...

    @abc.abstractmethod
    def factor(self, formula: Expr) -> str:
        """A formula as a number that may stand in a product."""

    def score(self, formula: Expr) -> str:
        """A formula as a score."""
        return self.factor(formula)

    def set_score(self, code: str) -> None:
        self.line(f"s = {code}")

    def forward(self, number: int, statement: Score | Keep) -> None:
        """A statement, leaving what its derivatives need."""
        reads = (derivative(formula_of(statement), r.node) for r in self.reads)
        if _use_score(*slopes(statement, is_first=number == 0), *reads):
            self.declare(f"before{number}", "s")
        if isinstance(statement, Keep):
            self.declare(f"kept{number}", self.truth(statement.predicate), is_truth=True)
            self.set_score(self.choose(f"kept{number}", "s", self.factor(statement.fill)))
        else:
            self.set_score(self.score(statement.value))

    def backward(self, number: int, statement: Score | Keep, wanted: Sequence[int]) -> None:
        """From `ds` of a statement's result to that of the score before it, and to the wanted of `reads`."""
        by_score, by_dot = slopes(statement, is_first=number == 0)
        others = {f"of_read{i}": derivative(formula_of(statement), self.reads[i].node) for i in wanted}
        others["of_dot"] = by_dot
        if _use_score(by_score, *others.values()):
            self.set_score(f"before{number}")
        masks = isinstance(statement, Keep)
        for name, slope in others.items():
            self.add(name, self.choose(f"kept{number}", self.zero, "ds") if masks else "ds", slope)
        if masks:
            hidden = self.zero if by_score is ZERO else f"ds * {self.factor(by_score)}"
            self.line(f"ds = {self.choose(f'kept{number}', 'ds', hidden)}")
        elif not E.is_const(by_score, 1):
            self.line(f"ds = ds * {self.factor(by_score)}")

    def add(self, name: str, flow: str, slope: Expr) -> None:
        """Add what flows through a formula of that slope to the gradient of that name."""
        if slope is ZERO:
            return
        code = flow if E.is_const(slope, 1) else f"{flow} * {self.factor(slope)}"
        if name in self.written:
            self.line(f"{name} += {code}")
        else:
            self.declare(name, code)
        self.written.add(name)


def _use_score(*formulas: Expr) -> bool:
    return any(n in (DOT, SCORE) for formula in formulas for n in E.walk(formula))
