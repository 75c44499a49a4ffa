"""What the backward kernels compute of a tile of queries and keys: weights, and the gradients of scores.

Weights are computed again from the scores and the rows' log-sum-exp. With p the weights and
delta = rowsum(dout * out) - dlse:

    ds = p * (f * (dout . v) - delta)         f: what the program makes of a weight, as a multiple

and from ds back through the program's statements to the dot, and on the way to what they read: a statement
s' = e(s, dot, r) gives ds * de/dr to the read.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.codegen.derivative import ZERO, derivative, formula_of, slopes
from attngraph.codegen.triton.emit import Emitter
from attngraph.codegen.triton.plan import DTYPES
from attngraph.codegen.triton.read_gradients import BackwardPlan, read_gradients
from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.ir.score import DOT, SCORE, Keep, Score, Statement

_WITHIN = "(q < Sq) & (k < Skv)"


class TileEmitter(Emitter):
    """Writes the tiles of backward kernels; `emit_backward.py` has the kernels around them."""

    def __init__(self, plan: BackwardPlan) -> None:
        super().__init__(plan)
        self.reads = read_gradients(plan)
        self._written: set[str] = set()

    def tile(self, wanted: Sequence[int] = ()) -> tuple[list[str], list[str]]:
        """Lines that make `p` (weights), `ds` (the gradient of the dot) and `of_read<i>` for the wanted of
        `reads`, and the lines that they need of the queries alone."""
        plan, writer, factor = self.plan, self.writer, self.multiple.factor
        writer.begin_body()
        writer.before.clear()
        writer._outer.clear()
        self._written.clear()
        statements = list(plan.statements)
        for number, statement in enumerate(statements):
            self.forward(number, statement)
        multiple = writer.expression(factor).code
        lines = [f"dot = {self.dot()}", "s = dot", *writer.inside]
        writer.inside.clear()
        unit = "s * RATE - row_lse * LOG2E" if plan.is_linear else "(s - row_lse) * LOG2E"
        weigh = "" if self.multiple.is_plain else f" * ({multiple})"
        lines += [
            f"p = tl.where({_WITHIN}, tl.exp2({unit}), 0.0)",
            *([] if self.multiple.keeps_nan else ["p = tl.where(p == p, p, 0.0)"]),
            f"weighed = {self.product_of('grad_tile', 'value_tile')}",
            f"ds = p * (weighed{weigh} - row_delta)",
        ]
        for number in wanted:
            self.add(f"of_read{number}", "p * weighed", derivative(factor, self.reads[number].node))
        for number in reversed(range(len(statements))):
            self.backward(number, statements[number], wanted)
        lines += writer.inside
        writer.inside.clear()
        if "of_dot" in self._written:
            lines.append("ds = ds + of_dot")
        if plan.is_linear:
            lines.append(f"ds = ds * {plan.program.scale!r}")
        # At places that are none, a row's delta or a formula may be NaN or infinite, times zero.
        names = ["ds", *(n for n in sorted(self._written) if n != "of_dot")]
        lines += [f"{name} = tl.where({_WITHIN}, {name}, 0.0)" for name in names]
        if weigh:
            lines.append(f"p = p{weigh}")
        return lines, list(writer.before)

    def forward(self, number: int, statement: Statement) -> None:
        """A statement, leaving what its derivatives need."""
        writer = self.writer
        found = [
            *slopes(statement, is_first=number == 0),
            *(derivative(formula_of(statement), r.node) for r in self.reads),
        ]
        if any(n in (DOT, SCORE) for slope in found for n in E.walk(slope)):
            writer.inside.append(f"before{number} = s")
        if isinstance(statement, Score):
            self.score(statement)
            return
        assert isinstance(statement, Keep)
        keep = writer.truth(statement.predicate)
        writer.inside.append(f"kept{number} = {keep}")
        fill = writer.expression(statement.fill)
        code = fill.code if fill.is_integer else self.narrow(fill.code)
        writer.inside.append(f"s = tl.where(kept{number}, s, {code})")

    def backward(self, number: int, statement: Statement, wanted: Sequence[int]) -> None:
        """`ds` of a statement's result becomes that of what it was made from."""
        lines, formula = self.writer.inside, formula_of(statement)
        by_score, by_dot = slopes(statement, is_first=number == 0)
        others = {f"of_read{i}": derivative(formula, self.reads[i].node) for i in wanted}
        others["of_dot"] = by_dot
        if any(n in (DOT, SCORE) for slope in (by_score, *others.values()) for n in E.walk(slope)):
            lines.append(f"s = before{number}")
        masks = isinstance(statement, Keep)
        for name, slope in others.items():
            self.add(name, f"tl.where(kept{number}, 0.0, ds)" if masks else "ds", slope)
        if masks:
            hidden = "0.0" if by_score is ZERO else f"ds * ({self.real(by_score)})"
            lines.append(f"ds = tl.where(kept{number}, ds, {hidden})")
        elif not E.is_const(by_score, 1):
            lines.append(f"ds = ds * ({self.real(by_score)})")

    def add(self, name: str, flow: str, slope: Expr) -> None:
        """Add what flows through a formula to the gradient of that name."""
        if slope is ZERO:
            return
        code = flow if E.is_const(slope, 1) else f"{flow} * ({self.real(slope)})"
        self.writer.inside.append(f"{name} {'+=' if name in self._written else '='} {code}")
        self._written.add(name)

    def real(self, formula: Expr) -> str:
        term = self.writer.expression(formula)
        return self.as_float32(term.code) if term.is_integer else self.narrow(term.code)

    def product_of(self, a: str, b: str) -> str:
        return f"tl.dot({a}, tl.trans({b}){self.exact})"

    def added(self, total: str, a: str, b: str) -> str:
        return f"{total} = tl.dot({a}.to({b}.dtype), {b}, {total}{self.exact})"

    @property
    def exact(self) -> str:
        return ', input_precision="ieee"' if DTYPES[self.plan.dtype] == "float32" else ""
