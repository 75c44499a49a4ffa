"""The backward pass of a score program as the source of a C library: what `c/backward.h` leaves open.

The statements are computed again, then followed backwards (`codegen/derivative.py`): from the gradient of
the score to that of the dot, and on the way to what the statements read (`codegen/read_gradients.py`). With
w the softmax's weight, f what the program makes of it as a multiple, and delta = grad . out - grad_lse:

    ds = w * (f * (grad . v) - delta)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from attngraph.codegen.cpu.expression import INNER, Writer
from attngraph.codegen.cpu.source import TILE_ARGUMENTS, Draft, Plan, Source, function
from attngraph.codegen.cpu.terms import cast, truth
from attngraph.codegen.derivative import ZERO, derivative, formula_of, slopes
from attngraph.codegen.read_gradients import COLUMNS, PAIRS, ROWS, ReadGradient, read_gradients
from attngraph.codegen.weights import Multiple, weight_multiple
from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.ir.score import DOT, SCORE, Keep, Score

_ARGUMENTS = f"Call *c, {TILE_ARGUMENTS}, float *S, float *G, const float *known"
_ROW = (
    "float *flow = G + i * BLOCK_K;",
    "const float base = known[i], unit = known[BLOCK_Q + i], delta = known[2 * BLOCK_Q + i];",
)


@dataclasses.dataclass(frozen=True)
class BackwardPlan(Plan):
    """`wanted`: numbers of the reads whose gradients are asked for."""

    wanted: tuple[int, ...] = ()


@functools.lru_cache(maxsize=256)
def write(plan: BackwardPlan) -> Source:
    """The source of a plan's backward pass.

    Raises:
        UnsupportedError: the program has something that is not written as C, or no derivative that is; says
            what.
    """
    draft = Draft(plan)
    reads = read_gradients(plan.program, plan.wanted)
    multiple = weight_multiple(plan.program)

    def part(name: str, statements: Sequence[Score | Keep], pair: int | None = None) -> str:
        return _Part(draft.writer(), statements, multiple, reads, pair).function(name)

    pairs = [number for number, read in enumerate(reads) if read.kind == PAIRS]
    draft.parts += [part("differentiate", draft.before), part("differentiate_unmasked", draft.unmasked)]
    draft.parts += [part(f"differentiate_pairs{n}", draft.before, n) for n in pairs]
    if pairs:
        draft.parts.append(_choice_of_pairs(pairs))
    for name, kind in (("by_rows", ROWS), ("by_columns", COLUMNS)):
        flags = ", ".join(str(int(read.kind == kind)) for read in reads) or "0"
        draft.parts.append(f"static const int {name}[] = {{{flags}}};")
    draft.defines += [f"SUMS {len(reads)}", f"HAS_PAIRS {int(bool(pairs))}"]
    draft.defines.append(f"HAS_ROWS {int(any(read.kind == ROWS for read in reads))}")
    return draft.source("block.h", "pass.h", "backward.h")


def _choice_of_pairs(numbers: Sequence[int]) -> str:
    given = "c, b, h, q0, rows, k0, keys, S, G, known"
    cases = "".join(f"    if (number == {n}) differentiate_pairs{n}({given});\n" for n in numbers)
    head = _ARGUMENTS.replace("Call *c, ", "Call *c, int number, ")
    return f"static void differentiate_pairs({head}) {{\n{cases}}}\n"


class _Part:
    """One function over a tile: weights and gradients of dots in place and sums for reads, or with `pair`
    what that one of the reads gets of each pair."""

    def __init__(
        self, writer: Writer, statements: Sequence[Score | Keep], multiple: Multiple,
        reads: Sequence[ReadGradient], pair: int | None,
    ) -> None:  # fmt: skip
        self.writer, self.statements, self.multiple, self.reads = writer, statements, multiple, reads
        self.pair = pair
        self.summed = [n for n, r in enumerate(reads) if (r.kind != PAIRS if pair is None else n == pair)]
        self.lines = writer.lines[INNER]
        self.written: set[str] = set()

    def function(self, name: str) -> str:
        self.body()
        body = ["const float dot = row[j];", "float s = dot;", *self.lines]
        if self.pair is not None:
            of_pair = f"of_read{self.pair}"
            result = of_pair if of_pair in self.written else "0.0f"
            body.append(f"row[j] = j < keys ? {result} : 0.0f;")
            return function(f"static void {name}({_ARGUMENTS}) {{", self.writer, body, [*_ROW], [], "")
        body += ["row[j] = j < keys ? p : 0.0f;", "flow[j] = j < keys ? ds : 0.0f;"]
        summed = [n for n in self.summed if f"of_read{n}" in self.written]
        rows = [n for n in summed if self.reads[n].kind == ROWS]
        for n in summed:
            to = f"sum{n}" if n in rows else f"of_columns[{n} * BLOCK_K + j]"
            body.append(f"{to} += j < keys ? of_read{n} : 0.0f;")
        unseen = [n for n in self.summed if self.reads[n].kind == ROWS and n not in rows]
        before = [*_ROW, *(f"float sum{n} = 0;" for n in rows)]
        after = [f"of_rows[{n} * BLOCK_Q + i] = {f'sum{n}' if n in rows else '0'};" for n in (*rows, *unseen)]
        head = f"static void {name}({_ARGUMENTS}, float *of_rows, float *of_columns) {{"
        reductions = f"reduction(+ : {', '.join(f'sum{n}' for n in rows)})" if rows else ""
        return function(head, self.writer, body, before, after, reductions)

    def body(self) -> None:
        """Lines that make `p`, `ds` (of the dot) and `of_read<n>` of what is summed."""
        for number, statement in enumerate(self.statements):
            self.forward(number, statement)
        factor = self.multiple.factor
        self.lines += ["const float w = exp_of_negative(s - base) * unit;", "const float given = flow[j];"]
        if not self.multiple.keeps_nan:
            self.lines.append("const float seen = w == w ? w : 0.0f;")
        seen = "w" if self.multiple.keeps_nan else "seen"
        if self.multiple.is_plain:
            self.lines += [f"const float p = {seen};", "float ds = w * (given - delta);"]
        else:
            self.lines.append(f"const float f = {cast(self.writer.expression(factor), 'float')};")
            self.lines += [f"const float p = {seen} * f;", "float ds = w * (given * f - delta);"]
        for n in self.summed:
            self.add(f"of_read{n}", f"{seen} * given", derivative(factor, self.reads[n].node))
        for number in reversed(range(len(self.statements))):
            self.backward(number, self.statements[number])
        if "of_dot" in self.written:
            self.lines.append("ds += of_dot;")

    def forward(self, number: int, statement: Score | Keep) -> None:
        """A statement, leaving what its derivatives need."""
        self.lines.append(f"const float before{number} = s;")
        if isinstance(statement, Score):
            value = cast(self.writer.expression(statement.value), "float")
        else:
            kept = truth(self.writer.expression(statement.predicate))
            self.lines.append(f"const int kept{number} = {kept};")
            value = f"kept{number} ? s : {cast(self.writer.expression(statement.fill), 'float')}"
        self.assign(value)

    def assign(self, value: str) -> None:
        self.lines.append(f"s = {value};")
        self.writer.changed("s")

    def backward(self, number: int, statement: Score | Keep) -> None:
        """`ds` of a statement's result becomes that of what it was made from."""
        by_score, by_dot = slopes(statement, is_first=number == 0)
        others = {f"of_read{n}": derivative(formula_of(statement), self.reads[n].node) for n in self.summed}
        others["of_dot"] = by_dot
        if any(n in (DOT, SCORE) for slope in (by_score, *others.values()) for n in E.walk(slope)):
            self.assign(f"before{number}")
        masks = isinstance(statement, Keep)
        for name, slope in others.items():
            self.add(name, f"(kept{number} ? 0.0f : ds)" if masks else "ds", slope)
        if masks:
            hidden = "0.0f" if by_score is ZERO else f"ds * {self.real(by_score)}"
            self.lines.append(f"ds = kept{number} ? ds : {hidden};")
        elif not E.is_const(by_score, 1):
            self.lines.append(f"ds = ds * {self.real(by_score)};")

    def add(self, name: str, flow: str, slope: Expr) -> None:
        """Add what flows through a formula to the gradient of that name."""
        if slope is ZERO:
            return
        code = flow if E.is_const(slope, 1) else f"{flow} * {self.real(slope)}"
        self.lines.append(f"{name} += {code};" if name in self.written else f"float {name} = {code};")
        self.written.add(name)

    def real(self, formula: Expr) -> str:
        return cast(self.writer.expression(formula), "float")
