"""The backward pass of a score program as the source of a C library: functions that `c/backward.h` calls.

The statements are computed again, then differentiated in reverse (`ir/language/derivative.py`): from the
gradient of the score to that of the dot, and to those of the tensors that the statements read
(`codegen/scalar/read_gradients.py`). With w the softmax's weight, f the factor by which the program changes
it, and delta = grad . out - grad_lse:

    ds = w * (f * (grad . v) - delta)
"""

import dataclasses
import functools
from collections.abc import Sequence

from attngraph.codegen.cpu.expression import Writer
from attngraph.codegen.cpu.source import TILE_ARGUMENTS, Draft, Plan, Source, function
from attngraph.codegen.scalar.chain import Chain
from attngraph.codegen.scalar.form import Place
from attngraph.codegen.scalar.read_gradients import COLUMNS, PAIRS, ROWS, ReadGradient, read_gradients
from attngraph.codegen.scalar.weights import Multiple, weight_multiple
from attngraph.ir.language.derivative import derivative
from attngraph.ir.language.score import Keep, Score
from attngraph.ir.ops.kernels import TRUSTED

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
        UnsupportedError: an operation, or its derivative, cannot be emitted as C.
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
    draft.defines += [f"TRUSTED {TRUSTED!r}f", f"SUMS {len(reads)}", f"HAS_PAIRS {int(bool(pairs))}"]
    draft.defines.append(f"HAS_ROWS {int(any(read.kind == ROWS for read in reads))}")
    return draft.source("tile.h", "block.h", "pass.h", "backward.h")


def _choice_of_pairs(numbers: Sequence[int]) -> str:
    given = "c, b, h, q0, rows, k0, keys, S, G, known"
    cases = "".join(f"    if (number == {n}) differentiate_pairs{n}({given});\n" for n in numbers)
    head = _ARGUMENTS.replace("Call *c, ", "Call *c, int number, ")
    return f"static void differentiate_pairs({head}) {{\n{cases}}}\n"


class _Part(Chain):
    """One function over a tile: weights and gradients of dots in place, and sums for reads; or, with `pair`,
    the gradient that one read gets from each pair."""

    def __init__(
        self, writer: Writer, statements: Sequence[Score | Keep], multiple: Multiple,
        reads: Sequence[ReadGradient], pair: int | None,
    ) -> None:  # fmt: skip
        super().__init__(writer, reads)
        self.writer: Writer = writer
        self.statements, self.multiple, self.pair = statements, multiple, pair
        self.summed = [n for n, r in enumerate(reads) if (r.kind != PAIRS if pair is None else n == pair)]

    def function(self, name: str) -> str:
        self.body()
        body = ["const float dot = row[j];", "float s = dot;", *self.writer.lines[Place.INNER]]
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
        """Write the lines that compute `p`, `ds` (of the dot) and `of_read<n>` for the reads that are
        summed."""
        statements = list(enumerate(self.statements))
        for number, statement in statements:
            self.forward(number, statement)
        factor, declare = self.multiple.factor, self.writer.declare
        declare("w", "exp_of_negative(s - base) * unit")
        declare("given", "flow[j]")
        if not self.multiple.keeps_nan:
            declare("seen", "w == w ? w : 0.0f")
        seen = "w" if self.multiple.keeps_nan else "seen"
        if self.multiple.is_plain:
            declare("p", seen)
            declare("ds", "w * (given - delta)")
        else:
            declare("f", self.writer.real(factor))
            declare("p", f"{seen} * f")
            declare("ds", "w * (given * f - delta)")
        for n in self.summed:
            self.add(f"of_read{n}", f"{seen} * given", derivative(factor, self.reads[n].node))
        for number, statement in reversed(statements):
            self.backward(number, statement, self.summed)
        if "of_dot" in self.written:
            self.writer.line("ds += of_dot")
