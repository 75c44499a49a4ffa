"""A plan as the Triton source of one forward kernel: a module that a person can open and read.

The kernel is the online softmax (Milakov and Gimelshein 2018, section 3) over blocks of keys, as in
FlashAttention-2 (Dao 2023, algorithm 1): one program per block of queries of one head. It has two loops
over the same body. The first takes whole tiles; the second those at an edge (the end of the keys, the
diagonal of a causal mask), and only there are bounds and the causal predicate evaluated. A causal
program's loops end at its diagonal. Where other masks leave tiles out, the kernel is given lists of the
tiles that it visits (`visits.py`), first of those in which no mask hides anything. Nothing is in the source
that the program does not need.
"""

from __future__ import annotations

import dataclasses
import math

from attngraph.codegen.triton import schedule
from attngraph.codegen.triton.expression import PRODUCT, Writer, follows_score
from attngraph.codegen.triton.helpers import helpers
from attngraph.codegen.triton.plan import DTYPES, Plan, padded
from attngraph.codegen.weights import Multiple, weight_multiple
from attngraph.ir import expr as E
from attngraph.ir import score as S
from attngraph.ir.score import DOT, SCORE, Keep, Score, Statement

NEGATIVE_INFINITY = 'float("-inf")'
NEXT_TILE = "start = tl.load(tiles + row * tl.cdiv(Skv, BLOCK_K) + i) * BLOCK_K"
LISTS = ("tiles", "counts", "row_b", "row_h")
"""Arguments of a kernel that is given lists: see `visits.Visits`."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The source of a module, the name of its kernel, and the names of the kernel's arguments."""

    source: str
    name: str
    arguments: tuple[str, ...]


def arguments(plan: Plan) -> tuple[str, ...]:
    """The kernel's arguments in order: tensors, lengths, strides, then for each read its tensor,
    strides and the extents that its indices are compared with, then the sizes."""
    found = ["query", "key", "value", "out", "lse", "Hq", "Sq", "Skv"]
    found += [f"{tensor}_{axis}" for tensor in ("query", "key", "value") for axis in "bhsd"]
    return (*found, *(LISTS if plan.listed else ()), *names_of_reads(plan))


def names_of_reads(plan: Plan) -> tuple[str, ...]:
    """The last arguments of any kernel: for each read its tensor, strides and the extents that its indices
    are compared with, then the sizes."""
    found: list[str] = []
    for read in plan.reads:
        name = f"r{read.number}"
        found += [name, *(f"{name}_stride{axis}" for axis in range(read.rank))]
        found += [f"{name}_size{axis}" for axis in plan.guarded_axes(read.number)]
    return (*found, *(f"n{i}" for i in range(plan.program.sizes)))


def name_of(plan: Plan) -> str:
    """What the kernel computes, in a word or two."""
    if plan.diagonal is not None:
        kind = "causal_"
    elif plan.program.keeps:
        kind = "masked_"
    else:
        kind = "" if plan.is_linear else "scored_"
    return f"{kind}attention"


def emit(plan: Plan) -> Kernel:
    """The kernel of a plan, in the schedule that its blocks ask for.

    Raises:
        UnsupportedError: the score program has something that is not written yet; says what.
    """
    from attngraph.codegen.triton.emit_specialised import SpecialisedEmitter

    return (SpecialisedEmitter if plan.blocks.specialised else Emitter)(plan).kernel()


class Emitter:
    """Writes one forward kernel, in the classic schedule. `emit_specialised.py` changes how tiles come and
    the loops, `emit_decode.py` where queries and keys come from."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.writer = Writer(plan)
        self.multiple: Multiple = weight_multiple(plan.program)
        self.name = name_of(plan)
        self.D, self.Dv = padded(plan.D), padded(plan.Dv)

    def kernel(self) -> Kernel:
        # The loops come first: they find out what must stand before them.
        loops, start, finish = self.loops(), self.start(), self.finish()
        lines = [*self.begin(), *self.writer.before, *start, *self.loop_bounds(), *loops, *finish]
        sizes = [a for a in arguments(self.plan) if a.startswith("n")]
        decorator = f"@triton.jit(do_not_specialize={sizes!r})" if sizes else "@triton.jit"
        text = "\n\n\n".join([
            self.header(),
            *(h.rstrip() for h in helpers(self.writer.calls)),
            self.absorb(),
            "\n".join([decorator, f"def {self.name}(", *self.signature(), "):", *indented(lines)]),
        ])  # fmt: skip
        return Kernel(text + "\n", self.name, arguments(self.plan))

    def loops(self) -> list[str]:
        """Over whole tiles, then over those at an edge."""
        whole, edge = self.body(edge=False), self.body(edge=True)
        if self.plan.listed:
            return [
                "for i in tl.range(0, whole):", *indented([NEXT_TILE, *whole]),
                "for i in tl.range(whole, stop):  # under a mask", *indented([NEXT_TILE, *edge]),
            ]  # fmt: skip
        return [
            "for start in tl.range(0, whole, BLOCK_K):", *indented(whole),
            "for start in tl.range(whole, stop, BLOCK_K):  # at an edge", *indented(edge),
        ]  # fmt: skip

    def header(self) -> str:
        plan = self.plan
        program = [f"#     {line}" for line in (str(plan.program) or "s = dot").split("\n")]
        heads = "Hq" if plan.group == 1 else f"Hq // {plan.group}"
        linear = [f"RATE = tl.constexpr({plan.rate!r})  # scale times log2(e)"] if plan.is_linear else []
        return "\n".join([
            f"# {self.name}, forward, written by attngraph. For each batch b, head h, query q and key k:",
            *program,
            f"# query [B, Hq, Sq, {plan.D}], key [B, Hkv, Skv, {plan.D}], value [B, Hkv, Skv, {plan.Dv}], "
            f"{DTYPES[plan.dtype]};",
            f"# Hkv = {heads}; out [B, Sq, Hq, {plan.Dv}] in memory, lse [B, Hq, Sq].",
            *self.remark(),
            "",
            "import triton",
            "import triton.language as tl",
            "",
            f"BLOCK_Q = tl.constexpr({plan.blocks.q})",
            f"BLOCK_K = tl.constexpr({plan.blocks.k})",
            *(linear or [f"LOG2E = tl.constexpr({math.log2(math.e)!r})"]),
        ])  # fmt: skip

    def remark(self) -> list[str]:
        """Of the schedule: why it is not another one."""
        reason = schedule.obstacle(self.plan)
        return [] if reason is None else [f"# Not warp-specialised: {reason}."]

    def absorb(self) -> str:
        """One step of the online softmax, as a function of the module."""
        linear = self.plan.is_linear
        weighs = not self.multiple.is_plain
        exact = ', input_precision="ieee"' if DTYPES[self.plan.dtype] == "float32" else ""
        scaled = " * RATE" if linear else ""
        w = "s * RATE - base" if linear else "(s - base) * LOG2E"
        shrink = "m - base" if linear else "(m - base) * LOG2E"
        lines = [
            "@triton.jit",
            f"def absorb(m, l, acc, s, {'multiple, ' if weighs else ''}value_tile):",
            '    """Join a tile of scores and values to the rows\' maximum m, sum l and weighted sum acc."""',
            f"    top = tl.maximum(m, tl.max(s, 1, keep_dims=True){scaled})",
            f"    base = tl.where(top == {NEGATIVE_INFINITY}, 0.0, top)  # a row may have no key yet",
            f"    w = tl.exp2({w})",
            f"    shrink = tl.exp2({shrink})",
            "    l = l * shrink + tl.sum(w, 1, keep_dims=True)",
            *(["    w = w * multiple"] if weighs else []),
            "    w = w.to(value_tile.dtype)",
            f"    return top, l, tl.dot(w, value_tile, acc * shrink{exact})",
        ]
        return "\n".join(lines)

    def signature(self) -> list[str]:
        """The arguments, a line for each group of them."""
        names = arguments(self.plan)
        rows = [names[0:5], names[5:8], names[8:12], names[12:16], names[16:20]]
        rest = list(names[20:])
        if self.plan.listed:
            rows.append(LISTS)
            rest = rest[len(LISTS) :]
        for read in self.plan.reads:
            count = 1 + read.rank + len(self.plan.guarded_axes(read.number))
            rows.append(tuple(rest[:count]))
            rest = rest[count:]
        return [f"    {', '.join(row)}," for row in (*rows, tuple(rest)) if row]

    def begin(self) -> list[str]:
        """Which block of queries of which head this program computes, and the queries."""
        plan = self.plan
        # The last blocks of a causal head have the most keys, so they go first.
        block = "blocks - 1 - place % blocks" if plan.diagonal else "place % blocks"
        q, b, h = "first + tl.arange(0, BLOCK_Q)[:, None]", "place // blocks // Hq", "place // blocks % Hq"
        if plan.wide:
            q, b, h = (f"tl.cast({code}, tl.int64)" for code in (q, b, h))
        return [
            "place = tl.program_id(0)",
            "blocks = tl.cdiv(Sq, BLOCK_Q)",
            f"first = ({block}) * BLOCK_Q",
            f"b = {b}",
            f"h = {h}",
            f"q = {q}  # [BLOCK_Q, 1]",
            "across = tl.arange(0, BLOCK_K)[None, :]",
            *self.operands(),
        ]

    def operands(self) -> list[str]:
        """Where tiles of queries, keys and values come from, and the queries."""
        return [
            "down = tl.cast(tl.arange(0, BLOCK_K), tl.int64)[:, None]",
            *self.widths(),
            *self.head("query", "h", "tl.cast(q, tl.int64)", "d"),
            *self.head("key", self.group, "down", "d"),
            *self.head("value", self.group, "down", self.dv),
            f"query_tile = tl.load(query_head, mask={self.inside('q < Sq', 'd')}, other=0.0)",
        ]

    def widths(self) -> list[str]:
        """The columns of tiles."""
        lines = [f"d = tl.cast(tl.arange(0, {self.D}), tl.int64)[None, :]"]
        if self.plan.Dv != self.plan.D:
            lines.append(f"dv = tl.cast(tl.arange(0, {self.Dv}), tl.int64)[None, :]")
        return lines

    @property
    def group(self) -> str:
        """The head of the keys."""
        return f"h // {self.plan.group}" if self.plan.group > 1 else "h"

    @property
    def dv(self) -> str:
        return "d" if self.plan.Dv == self.plan.D else "dv"

    def head(self, name: str, head: str, rows: str, columns: str) -> list[str]:
        """The addresses of a tensor's first tile."""
        return [self.base(name, head), f"{name}_head += {rows} * {name}_s + {columns} * {name}_d"]

    def base(self, name: str, head: str) -> str:
        """The address of a tensor's head."""
        return (
            f"{name}_head = {name} + tl.cast(b, tl.int64) * {name}_b + tl.cast({head}, tl.int64) * {name}_h"
        )

    def inside(self, rows: str, columns: str) -> str:
        """The mask of a tile: rows in range, and columns where the width is padded; may be empty."""
        width, tile = (self.plan.D, self.D) if columns == "d" else (self.plan.Dv, self.Dv)
        parts = [rows] if rows else []
        if width != tile:
            parts.append(f"{columns} < {width}")
        return " & ".join(f"({p})" for p in parts) if len(parts) > 1 else "".join(parts)

    def start(self) -> list[str]:
        """Rows before any key: nothing, or the sink."""
        zeros = "tl.zeros([BLOCK_Q, 1], tl.float32)"
        lines = [f"m = {zeros} + {NEGATIVE_INFINITY}", f"l = {zeros}"]
        if self.plan.program.sink is not None:
            # Written here, after the loops' bodies, so it may add lines before the loop.
            sink = self.writer.expression(self.plan.program.sink)
            unit = self.as_float32(sink.code) if sink.is_integer else self.narrow(sink.at(PRODUCT))
            if self.plan.is_linear:
                unit += f" * {math.log2(math.e)!r}"
            lines = [f"m = {zeros} + {unit}", f"l = tl.where(m == {NEGATIVE_INFINITY}, 0.0, 1.0)"]
        return [*lines, f"acc = tl.zeros([BLOCK_Q, {self.Dv}], tl.float32)"]

    def loop_bounds(self) -> list[str]:
        before, whole, stop = self.bounds()
        return [*before, f"whole = {whole}", f"stop = {stop}"]

    def bounds(self) -> tuple[list[str], str, str]:
        """Where whole tiles end and where keys do, and the lines that this needs."""
        if self.plan.listed:
            row = "tl.cast(b, tl.int64) * row_b + tl.cast(h, tl.int64) * row_h + first // BLOCK_Q"
            return [f"row = {row}"], "tl.load(counts + 2 * row)", "tl.load(counts + 2 * row + 1)"
        if self.plan.diagonal is None:
            return [], "Skv // BLOCK_K * BLOCK_K", "Skv"
        offset = self.plan.diagonal[1]
        if offset is E.ZERO:
            return (
                [], "tl.minimum(first + 1, Skv) // BLOCK_K * BLOCK_K  # every query sees these keys",
                "tl.minimum(first + BLOCK_Q, Skv)  # no query sees a key from here on",
            )  # fmt: skip
        shift = self.writer.expression(offset).code
        shift = f"tl.cast({shift}, tl.int64)" if self.plan.wide else f"({shift})"
        return (
            [], f"tl.maximum(tl.minimum(first + 1 + {shift}, Skv), 0) // BLOCK_K * BLOCK_K",
            f"tl.minimum(first + BLOCK_Q + {shift}, Skv)",
        )  # fmt: skip

    def body(self, edge: bool) -> list[str]:
        """One tile: its scores, and the step of the online softmax."""
        plan, writer = self.plan, self.writer
        writer.begin_body()
        skipped = plan.keeps_of_whole_tiles if not edge else ()
        statements = [s for s in plan.statements if s not in skipped]
        for statement in statements:
            self.score(statement)
        multiple = writer.expression(self.multiple.factor).code
        formulas = [p for s in statements for p in _formulas(s)] + [self.multiple.factor]
        lines = []
        if edge or any(S.index("k") in formula.free for formula in formulas):
            k = "start + across"
            lines.append(f"k = tl.cast({k}, tl.int64)" if plan.wide else f"k = {k}")
        lines += [self.load("key", "d", edge), *self.product(statements), *writer.inside]
        if edge:
            lines.append(f"s = tl.where(k < Skv, s, {NEGATIVE_INFINITY})")
        lines.append(self.load("value", self.dv, edge))
        factor = "" if self.multiple.is_plain else f"{multiple}, "
        return [*lines, f"m, l, acc = absorb(m, l, acc, s, {factor}value_tile)"]

    def load(self, name: str, columns: str, edge: bool) -> str:
        mask = self.inside("start + down < Skv" if edge else "", columns)
        guard = f", mask={mask}, other=0.0" if mask else ""
        return f"{name}_tile = tl.load({name}_head + tl.cast(start, tl.int64) * {name}_s{guard})"

    def product(self, statements: list[Statement]) -> list[str]:
        code = self.dot()
        named = [_mentions(s, DOT) for s in statements]
        if not any(named):
            return [f"s = {code}"]
        first = statements[0]
        replaced = isinstance(first, Score) and not _mentions(first, SCORE)
        return [f"dot = {code}"] if replaced else [f"dot = {code}", "s = dot"]

    def dot(self) -> str:
        exact = ', input_precision="ieee"' if DTYPES[self.plan.dtype] == "float32" else ""
        return f"tl.dot(query_tile, tl.trans(key_tile){exact})"

    def score(self, statement: Statement) -> None:
        """Write what a statement makes of the tile of scores."""
        writer = self.writer
        if isinstance(statement, Score):
            term = writer.expression(statement.value)
            code = self.as_float32(term.code) if term.is_integer else self.narrow(term.code)
            if not follows_score(statement.value):
                code = f"tl.zeros([BLOCK_Q, BLOCK_K], tl.float32) + {code}"
        else:
            assert isinstance(statement, Keep)
            keep = writer.truth(statement.predicate)
            fill = writer.expression(statement.fill)
            code = f"tl.where({keep}, s, {fill.code if fill.is_integer else self.narrow(fill.code)})"
        writer.inside.append(f"s = {code}")

    def as_float32(self, code: str) -> str:
        return f"tl.cast({code}, tl.float32)"

    def narrow(self, code: str) -> str:
        """Scores stay in float32 when a float64 tensor is read."""
        return self.as_float32(code) if any(r.kind == "double" for r in self.plan.reads) else code

    def finish(self) -> list[str]:
        """Divide by the sum (0 / 0, for a row without a key, is NaN) and store."""
        plan = self.plan
        result = "acc / l"
        if not self.multiple.keeps_nan:
            result = "tl.where(l > 0.0, acc / l, 0.0)"
        lse = "m + tl.log(l)" if not plan.is_linear else f"(m + tl.log2(l)) * {math.log(2)!r}"
        return [
            f"out_row = out + ((tl.cast(b, tl.int64) * Sq + q) * Hq + h) * {plan.Dv}",
            f"out_tile = ({result}).to(out.dtype.element_ty)",
            f"tl.store(out_row + {self.dv}, out_tile, mask={self.inside('q < Sq', self.dv)})",
            f"tl.store(lse + tl.cast(place // blocks, tl.int64) * Sq + q, {lse}, mask=q < Sq)",
        ]


def _mentions(statement: Statement, name: E.Expr) -> bool:
    return any(n is name for formula in _formulas(statement) for n in E.walk(formula))


def _formulas(statement: Statement) -> tuple[E.Expr, ...]:
    return (statement.predicate, statement.fill) if isinstance(statement, Keep) else (statement.value,)


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
