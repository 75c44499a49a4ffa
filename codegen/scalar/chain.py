"""A program's statements as lines of any language, forwards and then backwards by the chain rule.

Forwards, statements store the values that their derivatives need: `before<n>`, the score before statement n,
and `kept<n>`. Backwards, `ds` is the gradient of a statement's result and becomes that of the score before
it. Gradients that reach the dot directly are summed in `of_dot`, those of the reads in `of_read<i>`.
"""

from collections.abc import Sequence

from attngraph.codegen.scalar.read_gradients import ReadGradient
from attngraph.codegen.scalar.writer import FACTOR, Writer
from attngraph.ir.language import DOT, SCORE, E, Expr, Keep, Score, Statement
from attngraph.ir.language.derivative import ZERO, derivative


class Chain:
    """Writes the lines of one tile. `written`: the names of gradients that have been assigned."""

    def __init__(self, writer: Writer, reads: Sequence[ReadGradient]) -> None:
        self.writer, self.reads = writer, reads
        self.written: set[str] = set()

    def forward(self, number: int, statement: Score | Keep) -> None:
        """Write a statement, storing the values that its derivatives need."""
        writer = self.writer
        reads = (derivative(formula_of(statement), r.node) for r in self.reads)
        if use_score(*slopes(statement, is_first=number == 0), *reads):
            writer.declare(f"before{number}", "s")
        if isinstance(statement, Keep):
            writer.declare(f"kept{number}", writer.truth(statement.predicate), is_truth=True)
            writer.set("s", writer.choice.format(f"kept{number}", "s", writer.real(statement.fill)))
        else:
            writer.assign("s", statement)

    def backward(self, number: int, statement: Score | Keep, wanted: Sequence[int]) -> None:
        """Turn `ds` of a statement's result into that of the score before it, and add to the wanted
        reads'."""
        writer, kept = self.writer, f"kept{number}"
        by_score, by_dot = slopes(statement, is_first=number == 0)
        others = {f"of_read{i}": derivative(formula_of(statement), self.reads[i].node) for i in wanted}
        others["of_dot"] = by_dot
        if use_score(by_score, *others.values()):
            writer.set("s", f"before{number}")
        masks = isinstance(statement, Keep)
        for name, slope in others.items():
            self.add(name, writer.choice.format(kept, writer.zero, "ds") if masks else "ds", slope)
        if masks:
            hidden = writer.zero if by_score is ZERO else f"ds * {writer.real(by_score, FACTOR)}"
            writer.line(f"ds = {writer.choice.format(kept, 'ds', hidden)}")
        elif not E.is_const(by_score, 1):
            writer.line(f"ds = ds * {writer.real(by_score, FACTOR)}")

    def add(self, name: str, flow: str, slope: Expr) -> None:
        """Add `flow` times `slope` to the gradient called `name`."""
        if slope is ZERO:
            return
        code = flow if E.is_const(slope, 1) else f"{flow} * {self.writer.real(slope, FACTOR)}"
        if name in self.written:
            self.writer.line(f"{name} += {code}")
        else:
            self.writer.declare(name, code)
        self.written.add(name)


def use_score(*formulas: Expr) -> bool:
    """Whether any of the formulas depends on the dot or the score."""
    return any(n in (DOT, SCORE) for formula in formulas for n in E.walk(formula))


def formula_of(statement: Statement) -> Expr:
    """The formula that replaces the score: for a mask, its fill."""
    return statement.fill if isinstance(statement, Keep) else statement.value


def slopes(statement: Statement, *, is_first: bool) -> tuple[Expr, Expr]:
    """The derivatives of a statement's formula by the score before it and by the dot. In the first statement
    the score is the dot: the first result is the whole derivative, the second is zero. Raises
    UnsupportedError: as `derivative`."""
    formula = formula_of(statement)
    if not is_first:
        return derivative(formula, SCORE), derivative(formula, DOT)
    return derivative(E.replaced(formula, {SCORE: DOT}), DOT), ZERO
