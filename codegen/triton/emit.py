"""A plan as the Triton source of one forward kernel: a module that a person can open and read.

The kernel is the online softmax (Milakov and Gimelshein 2018, section 3) over blocks of keys, as in
FlashAttention-2 (Dao 2023, algorithm 1): one program per block of queries of one head. It has two loops
with the same body: over whole tiles, then over those at an edge (the end of the keys, the diagonal of a
causal mask). Only the second evaluates bounds and the causal predicate. A causal program's loops end at its
diagonal. Where other masks leave out tiles, the kernel gets lists of the tiles to visit (`visits.py`): first
those in which no mask hides anything. Tiles in which all keys are behind a finite fill come last, in a third
loop, and only where the largest score of some row is near the fill. The source contains only what the program
needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attngraph.codegen.scalar.weights import Multiple, weight_multiple
from attngraph.codegen.scalar.writer import PRODUCT
from attngraph.codegen.triton import module
from attngraph.codegen.triton.emit_rows import RowEmitter
from attngraph.codegen.triton.expression import Writer
from attngraph.codegen.triton.module import Groups, Kernel, indented, name_of, names_of_reads
from attngraph.codegen.triton.plan import DTYPES, UNDERFLOW, Plan
from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.score import DOT, SCORE, Keep, Score, formulas

NEGATIVE_INFINITY = 'float("-inf")'
INFINITY = 'float("inf")'
LOWEST = "-3.4028234663852886e+38"
"""The lowest finite float32: the maximum of a row that has no key yet. Differences from it are finite or
minus infinity, so that hidden scores weigh zero from it, too, where infinity minus itself would be NaN."""
LISTS = ("tiles", "counts", "row_b", "row_h")
"""Arguments of a kernel that is given lists: see `visits.Visits`."""
ABOUT_LISTS = (
    "tiles: which blocks of keys a block of queries visits; counts: how many keep all, how many are seen, "
    "and how many."
)


def arguments(plan: Plan) -> tuple[str, ...]:
    """The kernel's arguments in order: tensors, lengths, strides, lists of tiles, then reads and sizes."""
    return module.flat(groups(plan))


def groups(plan: Plan) -> Groups:
    return [
        ("query", "key", "value", "out", "lse"), ("Hq", "Sq", "Skv"),
        *strides_of("query", "key", "value"), LISTS if plan.listed else (), *names_of_reads(plan),
    ]  # fmt: skip


def strides_of(*tensors: str) -> Groups:
    """The names of the strides of tensors `[B, H, S, D]`."""
    return [tuple(f"{tensor}_{axis}" for axis in "bhsd") for tensor in tensors]


class Emitter(RowEmitter):
    """Writes one forward kernel. `emit_decode.py` changes where queries and keys lie."""

    extents = ("BLOCK_Q", "BLOCK_K")
    """The extents of a tile of scores."""

    splits = True

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.writer = Writer(plan, ", ".join(self.extents))
        self.multiple: Multiple = weight_multiple(plan.program)
        self.name = name_of(plan)

    def kernel(self) -> Kernel:
        # The loops are emitted first, because they determine the lines before them.
        loops, start, finish = self.loops(), self.start(), self.finish()
        bounds = [*self.loop_bounds(), *self.last_keys()]
        lines = [*self.begin(), *self.writer.before, *start, *bounds, *loops, *finish]
        functions = [self.step(), module.function(self.name, groups(self.plan), self.contract, lines)]
        return module.assemble(self.name, groups(self.plan), self.header(), self.writer.calls, functions)

    contract = "Output and log-sum-exp of a block of queries of one head."

    def loops(self) -> list[str]:
        """The loops over whole tiles and over those at an edge."""
        whole, edge = self.body(edge=False), self.body(edge=True)
        return [
            *self.first_tile(),
            *self.loop("0", "whole", whole),
            *self.loop("whole", "stop", edge, about="  # at an edge"),
            *self.behind_fill(edge),
        ]

    def behind_fill(self, edge: list[str]) -> list[str]:
        """The loop over tiles behind a finite fill."""
        if self.plan.fill is None:
            return []
        return [
            "# A row that has a larger score than the fill gives no weight to keys behind it.",
            f"every = {self.unless_low(f'tl.where(q < Sq, m, {INFINITY})', 'stop', 'every')}",
            *self.loop("stop", "every", edge, about="  # behind the fill"),
        ]

    def unless_low(self, numbers: str, yes: str, no: str) -> str:
        """A number, by whether some numbers are so far above the fill that exponentials vanish."""
        assert self.plan.fill is not None
        return f"tl.where(tl.min({numbers}) > {self.plan.fill + UNDERFLOW!r}, {yes}, {no})"

    def first_tile(self) -> list[str]:
        """Where the first tile of a list begins."""
        return [f"start = tl.load(line) * {self.extents[1]}"] if self.plan.listed else []

    def loop(
        self, begin: str, stop: str, body: Sequence[str], number: str = "i", about: str = ""
    ) -> list[str]:
        """A loop over tiles, each of which begins at `start`. It counts tiles, not elements: from a loop by
        steps of a tile, ptxas takes the products of sm_90 one at a time (warning C7515). The start of a
        listed tile is loaded one turn ahead, so that fetching the tile does not wait for it."""
        head = f"for i in tl.range({begin}, {stop}):{about}"
        if not self.plan.listed:
            return [head, *indented([f"start = {number} * {self.extents[1]}", *body])]
        ahead = f"start = tl.load(line + tl.minimum(i + 1, last)) * {self.extents[1]}"
        return [head, *indented([*body, ahead])]

    def header(self) -> str:
        title = f"{self.name}, forward, written by attngraph. For each batch b, head h, query q and key k"
        about = [
            *self.operands_in_words(),
            f"Hkv = {self.heads_of_keys}; out [B, Sq, Hq, {self.plan.Dv}] in memory, lse [B, Hq, Sq].",
            *([ABOUT_LISTS] if self.plan.listed else []),
        ]
        return module.header(title, self.plan, about, module.rate(self.plan) or [module.LOG2E])

    def operands_in_words(self) -> list[str]:
        D, Dv, dtype = self.plan.D, self.plan.Dv, DTYPES[self.plan.dtype]
        return [f"query [B, Hq, Sq, {D}], key [B, Hkv, Skv, {D}], value [B, Hkv, Skv, {Dv}], {dtype};"]

    @property
    def heads_of_keys(self) -> str:
        return "Hq" if self.plan.group == 1 else f"Hq // {self.plan.group}"

    def step(self) -> str:
        """One step of the online softmax, as a function of the module."""
        weighs = "" if self.multiple.is_plain else "multiple, "
        sums, values = self.both("acc"), self.both("value_tile")
        weights = [f"w = tl.exp2({self.exponents})", f"shrink = tl.exp2({self.fall})"]
        return "\n".join([
            "@triton.jit",
            f"def absorb(m, l, {sums}, s, {weighs}{values}):",
            '    """Join a tile of scores and values to the rows\' maximum m, sum l and weighted sum acc."""',
            *indented([self.top, *weights, *self.summed("value_tile")]),
            f"    return top, l, {', '.join(self.weighted_sums())}",
        ])  # fmt: skip

    @property
    def top(self) -> str:
        """The line that computes the rows' maximum with a tile's scores."""
        scaled = " * RATE" if self.plan.is_linear else ""
        return f"top = tl.maximum(m, tl.max(s, 1, keep_dims=True){scaled})"

    @property
    def exponents(self) -> str:
        """The exponents, of 2, of a tile's weights. Rounded once where that can be, so that the rounding
        error of top affects all weights of the row alike."""
        return "tl.fma(s, RATE, -top)" if self.plan.is_linear else "(s - top) * LOG2E"

    @property
    def fall(self) -> str:
        """The exponent of what sums weigh that were made with the maximum before."""
        return "m - top" if self.plan.is_linear else "(m - top) * LOG2E"

    def summed(self, like: str) -> list[str]:
        """Lines that join weights w to the rows' sum, and round them to the dtype of the tile `like`."""
        return [
            "l = l * shrink + tl.sum(w, 1, keep_dims=True)",
            *([] if self.multiple.is_plain else ["w = w * multiple"]),
            f"w = w.to({like}.dtype)",
        ]

    def weighted_sums(self) -> list[str]:
        """The weighted sums with a tile's values; two, where rows lie in two tiles."""
        pairs = zip(self.both("value_tile").split(", "), self.both("acc").split(", "), strict=True)
        return [f"tl.dot(w, {value}, {total} * shrink{self.exact})" for value, total in pairs]

    def begin(self) -> list[str]:
        """Lines that determine this program's block of queries and head, and load the queries."""
        plan = self.plan
        first = "first = place % blocks * BLOCK_Q"
        if plan.offset is not None:
            first = "first = (blocks - 1 - place % blocks) * BLOCK_Q  # blocks with the most keys go first"
        q, b, h = "first + tl.arange(0, BLOCK_Q)[:, None]", "place // blocks // Hq", "place // blocks % Hq"
        if plan.wide:
            q, b, h = (f"tl.cast({code}, tl.int64)" for code in (q, b, h))
        return [
            "place = tl.program_id(0)",
            "blocks = tl.cdiv(Sq, BLOCK_Q)",
            first,
            f"b = {b}",
            f"h = {h}",
            f"q = {q}  # [BLOCK_Q, 1]",
            "across = tl.arange(0, BLOCK_K)[None, :]",
            *self.operands(),
        ]

    def operands(self) -> list[str]:
        """Lines with the addresses of tiles of queries, keys and values, and the queries."""
        return [
            "down = tl.cast(tl.arange(0, BLOCK_K), tl.int64)[:, None]",
            *self.widths(),
            *self.head("query", "h", "tl.cast(q, tl.int64)", "d"),
            *self.head("key", self.group, "down", "d"),
            *self.head("value", self.group, "down", self.dv),
            f"query_tile = tl.load(query_head{self.guard('q < Sq', 'd')})",
            *([f"query_rest = tl.load(query_beside{self.guard('q < Sq', 'd_rest')})"] if self.rest else []),
        ]

    def start(self) -> list[str]:
        """The softmax state before any key: empty, or the sink."""
        zeros = "tl.zeros([BLOCK_Q, 1], tl.float32)"
        acc = [f"acc = tl.zeros([BLOCK_Q, {self.Dv}], tl.float32)"]
        if self.value_rest:
            acc.append(f"acc_rest = tl.zeros([BLOCK_Q, {self.value_rest}], tl.float32)")
        if self.plan.program.sink is None:
            return [f"m = {zeros} + {LOWEST}  # no key yet", f"l = {zeros}", *acc]
        # The rounding error of the sink enters its weight, as that of scores enters theirs.
        m, weight = (
            ("sink * RATE", "tl.exp2(tl.fma(sink, RATE, -m))") if self.plan.is_linear else ("sink", "1.0")
        )
        return [
            f"sink = {self.sink()}", f"m = tl.where(sink == {NEGATIVE_INFINITY}, {LOWEST}, {m})",
            f"l = tl.where(sink == {NEGATIVE_INFINITY}, 0.0, {weight})", *acc,
        ]  # fmt: skip

    def sink(self) -> str:
        """The rows' sink, in units of scores; emitted after the loops, so it may add lines before them."""
        assert self.plan.program.sink is not None
        unit, scale = self.writer.real(self.plan.program.sink, PRODUCT), self.plan.program.scale
        scaled = f" / {scale!r}" if self.plan.is_linear and scale != 1 else ""
        return f"tl.zeros([{self.extents[0]}, 1], tl.float32) + {unit}{scaled}"

    def loop_bounds(self) -> list[str]:
        before, *bounds = self.bounds()
        names = ("whole", "stop", "every") if self.plan.fill is not None else ("whole", "stop")
        return [*before, *(f"{name} = {bound}" for name, bound in zip(names, bounds, strict=False))]

    def bounds(self) -> tuple[list[str], str, str, str]:
        """The lines before, and how many tiles are whole, how many are seen, and how many with those that
        only finite fills hide. The last two differ only where the plan has a `fill`."""
        rows, columns = self.extents
        if self.plan.listed:
            return self.bounds_of_list(LISTS, "Skv")
        every, offset = f"tl.cdiv(Skv, {columns})", self.plan.offset
        if offset is None:
            return [], f"Skv // {columns}", every, every
        if offset is E.ZERO:
            whole = f"tl.minimum(first + 1, Skv) // {columns}  # every query sees all keys of these tiles"
            stop = f"tl.cdiv(tl.minimum(first + {rows}, Skv), {columns})"
            return [], whole, f"{stop}  # no query sees a key of later ones", every
        shift = self.writer.integer(offset, PRODUCT)
        shift = f"tl.cast({shift}, tl.int64)" if self.plan.wide else shift
        whole = f"tl.maximum(tl.minimum(first + 1 + {shift}, Skv), 0) // {columns}"
        stop = f"tl.cdiv(tl.maximum(tl.minimum(first + {rows} + {shift}, Skv), 0), {columns})"
        return [], whole, stop, every

    def bounds_of_list(self, names: Sequence[str], extent: str) -> tuple[list[str], str, str, str]:
        tiles, counts, b, h = names
        block = f"tl.cast(b, tl.int64) * {b} + tl.cast(h, tl.int64) * {h} + first // {self.extents[0]}"
        lines = [
            f"block = {block}",
            f"line = {tiles} + block * tl.cdiv({extent}, {self.extents[1]})",
            f"last = tl.load({counts} + 3 * block + 2) - 1",
        ]
        whole, stop = f"tl.load({counts} + 3 * block)", f"tl.load({counts} + 3 * block + 1)"
        return lines, whole, stop, "last + 1"

    @property
    def at_the_end(self) -> tuple[Keep, ...]:
        """The causal mask, where it is one comparison with the end of the keys. Where tiles are listed it
        stands beside other masks, and a last key of each query is one more number to hold: two comparisons
        take fewer registers there, but for kernels without a pipeline."""
        plan = self.plan
        apart = plan.listed and plan.blocks.stages > 1
        return () if plan.diagonal is None or apart else (plan.diagonal[0],)

    def last_keys(self) -> list[str]:
        """The last key that each query sees, by the causal mask."""
        if self.plan.diagonal is None or not self.at_the_end:
            return []
        offset = self.plan.diagonal[1]
        shift = "" if offset is E.ZERO else f" + {self.writer.integer(offset, PRODUCT)}"
        return [f"last_key = tl.minimum(q{shift}, Skv - 1)  # [{self.extents[0]}, 1]"]

    def body(self, edge: bool) -> list[str]:
        """One tile: its scores, and its step of the online softmax."""
        products, scores, multiple = self.scored(edge)
        sums, values = self.both("acc"), self.both("value_tile")
        factor = multiple and f"{multiple}, "
        step = f"m, l, {sums} = absorb(m, l, {sums}, s, {factor}{values})"
        return [*products, *scores, *self.load("value", self.dv, edge), step]

    def scored(self, edge: bool) -> tuple[list[str], list[str], str]:
        """Lines that multiply a tile's queries and keys; lines that make scores of the products, minus
        infinity where keys are hidden; and the factor by which the program changes weights ("": none)."""
        plan, writer = self.plan, self.writer
        writer.begin_body()
        skipped = plan.keeps_of_whole_tiles if not edge else self.at_the_end
        statements = [s for s in plan.statements if s not in skipped]
        for statement in statements:
            writer.assign("s", statement)
        multiple = writer.real(self.multiple.factor)
        shown = [p for s in statements for p in formulas(s)] + [self.multiple.factor]
        products = []
        if any(S.index("k") in formula.free for formula in shown):
            k = "start + across"
            products.append(f"k = tl.cast({k}, tl.int64)" if plan.wide else f"k = {k}")
        products += self.products(statements, edge)
        scores = list(writer.inside)
        if edge:
            seen = "across <= last_key - start" if self.at_the_end else "across < Skv - start"
            scores.append(f"s = tl.where({seen}, s, {NEGATIVE_INFINITY})")
        return products, scores, "" if self.multiple.is_plain else multiple

    def both(self, name: str) -> str:
        """The name of a tile as wide as values, and that of the tile beside it."""
        return f"{name}, {name.removesuffix('_tile')}_rest" if self.value_rest else name

    def products(self, statements: list[Score | Keep], edge: bool) -> list[str]:
        """Lines that load a tile of keys and multiply it with the queries: `dot` and `s`."""
        return [*self.load("key", "d", edge), *self.product(statements)]

    def product(self, statements: list[Score | Keep]) -> list[str]:
        mentions, replaces = uses_of_dot(statements)
        if not mentions:
            return [f"s = {self.dot()}"]
        return [f"dot = {self.dot()}", *([] if replaces else ["s = dot"])]

    def dot(self) -> str:
        code = f"tl.dot(query_tile, tl.trans(key_tile){self.exact})"
        return f"tl.dot(query_rest, tl.trans(key_rest), {code}{self.exact})" if self.rest else code

    @property
    def exact(self) -> str:
        """The option by which float32 products are not rounded to TF32."""
        return ', input_precision="ieee"' if DTYPES[self.plan.dtype] == "float32" else ""

    def finish(self) -> list[str]:
        """Divide by the sum (0 / 0, for a row without a key, is NaN) and store."""
        plan = self.plan
        result = "{acc} / l" if self.multiple.keeps_nan else "tl.where(l > 0.0, {acc} / l, 0.0)"
        lse = "m + tl.log(l)" if not plan.is_linear else f"(m + tl.log2(l)) * {math.log(2)!r}"
        return [
            f"out_row = out + ((tl.cast(b, tl.int64) * Sq + q) * Hq + h) * {plan.Dv}",
            *(
                line
                for part in ("", "_rest")[: 1 + bool(self.value_rest)]
                for line in (
                    f"out{part or '_tile'} = ({result.format(acc=f'acc{part}')}).to(out.dtype.element_ty)",
                    f"tl.store(out_row + {self.dv}{part}, out{part or '_tile'}, "
                    f"mask={self.inside('q < Sq', self.dv + part)})",
                )
            ),
            f"tl.store(lse + tl.cast(place // blocks, tl.int64) * Sq + q, {lse}, mask=q < Sq)",
        ]


def uses_of_dot(statements: Sequence[Score | Keep]) -> tuple[bool, bool]:
    """Whether statements mention the dot, and whether the first replaces the score without looking at it."""
    mentions = any(_mentions(s, DOT) for s in statements)
    replaces = bool(statements) and isinstance(statements[0], Score) and not _mentions(statements[0], SCORE)
    return mentions, mentions and replaces


def _mentions(statement: Score | Keep, name: E.Expr) -> bool:
    return any(n is name for formula in formulas(statement) for n in E.walk(formula))
