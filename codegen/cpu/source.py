"""A score program as the source of a C library: functions emitted for the program, between the headers in
`c/`.

Everything that changes the source is in a `Plan`; lengths, strides, tensors and sizes are arguments of
the call. Equal plans give equal source. In the backward pass, functions that `c/backward.h` calls compute the
statements again, then differentiate them in reverse (`ir/language/derivative.py`): from the gradient of the
score to that of the dot, and to those of the tensors that the statements read
(`codegen/scalar/read_gradients.py`). With w the softmax's weight, f the factor by which the program changes
it, and delta = grad . out - grad_lse:

    ds = w * (f * (grad . v) - delta)
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import torch

from attngraph.codegen.cpu.expression import Writer
from attngraph.codegen.cpu.native import ORDER, header, numbers
from attngraph.codegen.cpu.soft import UNDERFLOW
from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.form import Place
from attngraph.codegen.scalar.read_gradients import COLUMNS, PAIRS, ROWS, ReadGradient, read_gradients
from attngraph.codegen.scalar.weights import Multiple, is_multiple, refuse_dots, weight_multiple
from attngraph.codegen.scalar.writer import Chain
from attngraph.ir.dtypes import DTYPES, SCALED
from attngraph.ir.language import DOT, SCORE, E, Expr, Keep, Score, ScoreProgram, Weight, operation, parse
from attngraph.ir.language.derivative import derivative
from attngraph.ir.ops.kernels import TRUSTED
from attngraph.meaning.masks import tiles
from attngraph.meaning.masks.fold import any_fill, seen

MOST_READS, MOST_NUMBERS = (numbers("base.h")[f"MOST_{name}"] for name in ("READS", "NUMBERS"))
TILE_ARGUMENTS = "int b, int h, int q0, int rows, int k0, int keys"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One library: the program (without a scale, which is an argument), the dtype of q, k, v, and those
    of the tensors that it reads. `kept`: the dtype of a cache's pages where it is another one; the library
    then has only what attends to them."""

    program: ScoreProgram
    dtype: torch.dtype
    reads: tuple[torch.dtype, ...]
    kept: torch.dtype | None = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass(frozen=True)
class BackwardPlan(Plan):
    """`wanted`: numbers of the reads whose gradients are asked for."""

    wanted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """`numbers`: expressions of sizes whose values a call passes, with their kinds; `divisors`: those of
    them that must be positive; `masks`: the indices on which masks depend."""

    text: str
    numbers: tuple[tuple[Expr, str], ...]
    divisors: frozenset[Expr]
    masks: frozenset[str]


class Draft:
    """The source of a plan while it is built: functions over a tile, and the numbers that a call must pass.
    Raises UnsupportedError: the program has an operation that cannot be emitted as C."""

    def __init__(self, plan: Plan) -> None:
        if parse(plan.program.text) != plan.program:
            raise UnsupportedError("a program that was not made by the parser")
        if len(plan.reads) > MOST_READS:
            raise UnsupportedError(f"more than {MOST_READS} tensors that are read")
        self.plan = plan
        self.numbers: dict[Expr, str] = {}
        self.divisors: set[Expr] = set()
        self.defines = [DTYPES[plan.dtype].name.upper(), f"EXP_UNDERFLOW {UNDERFLOW[torch.float32]!r}"]
        self.defines += ["ORDERED", *ORDER] if plan.program.in_order else []
        before = [s for s in plan.program.statements if isinstance(s, (Score, Keep))]
        self.unmasked = [s for s in before if isinstance(s, Score)]
        self.parts = [
            _scores("scores", before, self.writer(), True),
            _scores("scores_unmasked", self.unmasked, self.writer(), False),
        ]
        self.before = before
        self.masks = frozenset(v.value for keep in plan.program.keeps for v in keep.predicate.free)
        if tiles.reads_data(plan.program):
            self.parts.append(tile_states("tile_states", plan.program, self.writer()))
            if all(keep.is_hard for keep in plan.program.keeps):
                self.defines.append("tile_states_soft tile_states")
            else:
                self.parts.append(tile_states("tile_states_soft", plan.program, self.writer(), soft=True))
            self.defines.append("HAS_TILE_STATES 1")
        if plan.program.sink is not None:
            writer = self.writer()
            result, places = writer.real(plan.program.sink), writer.lines
            self.parts.append(indented([
                "static float sink(Call *c, int b, int h, int q) {", "int bad = 0;", *places[Place.GROUP],
                *places[Place.ROW], "if (bad) c->bad = 1;", f"return {result};", "}",
            ]))  # fmt: skip
            self.defines.append("HAS_SINK")

    def writer(self) -> Writer:
        return Writer(self.plan.reads, self.numbers, self.divisors)

    def source(self, *headers: str) -> Source:
        """The whole source: `functions.h` and `base.h`, the functions of the program, and the headers that
        call them."""
        if len(self.numbers) > MOST_NUMBERS:
            raise UnsupportedError(f"more than {MOST_NUMBERS} expressions of sizes")
        lines = ("attngraph, for the scores", *(self.plan.program.text or "s = dot").splitlines())
        head = "".join(f"// {line}\n" for line in lines)
        defines = "".join(f"#define {flag}\n" for flag in self.defines)
        functions, base, *others = map(header, ("functions.h", "base.h", *headers))
        text = "\n".join([head + defines, functions, base, *self.parts, *others])
        return Source(text, tuple(self.numbers.items()), frozenset(self.divisors), self.masks)


@functools.lru_cache(maxsize=256)
def write(plan: Plan) -> Source:
    """The source of a plan. Raises UnsupportedError: the program has an operation that cannot be emitted as
    C, or the derivative of one."""
    draft = Draft(plan)
    if isinstance(plan, BackwardPlan):
        return _write_backward(draft, plan)
    after = [s for s in plan.program.statements if isinstance(s, Weight)]
    refuse_dots(plan.program)
    if after:
        draft.parts.append(_weigh(after, draft.writer()))
        draft.defines.append("HAS_WEIGHTS")
    exact = int(bool(after) and not all(is_multiple(s.value) for s in after))
    draft.defines.append(f"EXACT_WEIGHTS {exact}")
    if plan.dtype != torch.float32 or plan.kept is not None:
        draft.defines.append("SHORT_ELEMENTS")
    products = ("weights.h", "strands.h") if plan.program.in_order else ()
    if plan.kept is None:
        if plan.dtype == torch.bfloat16 and not after:  # weights that were changed keep their digits
            draft.defines.append("PAIRED")
        return draft.source("tile.h", "block.h", "pass.h", "loop.h", "elements.h", *products, "decode.h")
    draft.defines += [f"KEPT {DTYPES[plan.kept].word}", f"SCALED {int(plan.kept in SCALED)}"]
    return draft.source("tile.h", "block.h", "elements.h", *products, "decode.h")


def _scores(name: str, statements: Sequence[Score | Keep], writer: Writer, masked: bool) -> str:
    for statement in statements:
        writer.assign("s", statement)
    lines = ["const float dot = row[j];", "float s = dot;", *writer.lines[Place.INNER]]
    if masked:
        lines.append("s = j < keys ? s : -INFINITY;")
    lines += ["row[j] = s;", "best = s > best ? s : best;"]
    head = f"static void {name}(Call *c, {TILE_ARGUMENTS}, float *S, float *top) {{"
    return function(
        head, writer, lines, ["float best = top[i];"], ["top[i] = best;"], "reduction(max : best)"
    )


def _weigh(statements: Sequence[Weight], writer: Writer) -> str:
    for statement in statements:
        writer.assign("p", statement)
    lines = ["float p = row[j];", *writer.lines[Place.INNER], "row[j] = j < keys ? p : 0.0f;"]
    return function(f"static void weigh(Call *c, {TILE_ARGUMENTS}, float *S) {{", writer, lines, [], [], "")


def tile_states(name: str, program: ScoreProgram, writer: Writer, soft: bool = False) -> str:
    """C that computes what `tiles.block_map` computes for a block, element by element: whether any element
    has weight, and whether any mask hides one."""
    kept = functools.reduce(functools.partial(operation, "and"), [keep.predicate for keep in program.keeps])
    formulas = _bound(seen(program.statements, any_fill if soft else None), True), _bound(kept, False)
    sees, opens = map(writer.truth, formulas)
    body = [*writer.lines[Place.INNER], f"seen |= {sees} & (j < keys);", f"shut |= !({opens}) & (j < keys);"]
    after = ["*found |= seen | shut << 1;", "if (*found == 3) return;"]
    head = f"static void {name}(Call *c, {TILE_ARGUMENTS}, float *S, int *found) {{"
    return function(head, writer, body, ["int seen = 0, shut = 0;"], after, "reduction(| : seen, shut)")


def _bound(predicate: Expr, unknown: bool) -> Expr:
    """The predicate with `unknown` in place of conditions on scores, which are not computed yet."""
    if predicate.op == "not":
        return operation("not", _bound(predicate.args[0], not unknown))
    if predicate.op in ("and", "or"):
        return operation(predicate.op, *(_bound(a, unknown) for a in predicate.args))
    return E.const(unknown) if any(n in (DOT, SCORE) for n in E.walk(predicate)) else predicate


def function(
    head: str, writer: Writer, lines: list[str], before: list[str], after: list[str], reductions: str
) -> str:
    """A loop over a tile around `lines`, with the writer's lines at their places."""
    pragma = f"#pragma omp simd reduction(| : bad) {reductions}".rstrip()
    inner = ["for (int j = 0; j < BLOCK_K; ++j) {", "const int k = k0 + j;"]
    tile = writer.lines[Place.TILE]
    return indented([
        head, "int bad = 0;", *writer.lines[Place.GROUP],
        *(["#pragma omp simd reduction(| : bad)", *inner, *tile, "}"] if tile else []),
        "for (int i = 0; i < rows; ++i) {", "const int q = q0 + i;", "float *row = S + i * BLOCK_K;",
        *writer.lines[Place.ROW], *before, pragma, *inner, *lines, "}", *after, "}",
        "if (bad) c->bad = 1;", "}",
    ])  # fmt: skip


def indented(lines: Iterable[str]) -> str:
    """The lines of a function, indented by the braces that they open."""
    text, level = "", 0
    for line in lines:
        level -= line.startswith("}")
        text += f"{'' if line.startswith('#') else '    ' * level}{line}\n"
        level += line.endswith("{")
    return text


# --- gradients ---

_ARGUMENTS = f"Call *c, {TILE_ARGUMENTS}, float *S, float *G, const float *known"
_ROW = (
    "float *flow = G + i * BLOCK_K;",
    "const float base = known[i], unit = known[BLOCK_Q + i], delta = known[2 * BLOCK_Q + i];",
)


def _write_backward(draft: Draft, plan: BackwardPlan) -> Source:
    reads = read_gradients(plan.program, plan.wanted)
    multiple = weight_multiple(plan.program)

    def part(name: str, statements: Sequence[Score | Keep], pair: int | None = None) -> str:
        return _Part(draft.writer(), statements, multiple, reads, pair).function(name)

    pairs = [number for number, read in enumerate(reads) if read.kind == PAIRS]
    draft.parts += [part("differentiate", draft.before), part("differentiate_unmasked", draft.unmasked)]
    draft.parts += [part(f"differentiate_pairs{n}", draft.before, n) for n in pairs]
    if pairs:
        given = "c, b, h, q0, rows, k0, keys, S, G, known"
        cases = "".join(f"    if (number == {n}) differentiate_pairs{n}({given});\n" for n in pairs)
        head = _ARGUMENTS.replace("Call *c, ", "Call *c, int number, ")
        draft.parts.append(f"static void differentiate_pairs({head}) {{\n{cases}}}\n")
    for name, kind in (("by_rows", ROWS), ("by_columns", COLUMNS)):
        flags = ", ".join(str(int(read.kind == kind)) for read in reads) or "0"
        draft.parts.append(f"static const int {name}[] = {{{flags}}};")
    draft.defines += [f"TRUSTED {TRUSTED!r}f", f"SUMS {len(reads)}", f"HAS_PAIRS {int(bool(pairs))}"]
    draft.defines.append(f"HAS_ROWS {int(any(read.kind == ROWS for read in reads))}")
    return draft.source("tile.h", "block.h", "pass.h", "backward.h")


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
