"""A plan as the Triton source of attention over a cache: a few new queries per row, with its keys split.

Two kernels in one module. In the first, each program takes some queries of one row (those of all heads
that share a key head form one tile, so keys are loaded once for them) and one part of the row's keys: pages
looked up in the row's table, and in the last part the new tokens. It stores the weighted sum, the maximum and
the normaliser of its part. The second combines the parts ("split-KV", Dao et al. 2023, Flash-Decoding), with
a program for each query and head. Both take lengths from memory alone, so launches that a CUDA graph has
captured serve rows that have grown. Where values are the first elements of the keys, as for
latents, each tile is loaded once and used as both. Pages of 8 bits have a scale for each token and head: a
tile of them is widened, multiplied by its scales and rounded to the dtype of queries, as PyTorch does.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from attngraph.codegen.triton import module
from attngraph.codegen.triton.emit import NEGATIVE_INFINITY, Emitter
from attngraph.codegen.triton.module import Groups, Kernel, indented, names_of_reads
from attngraph.codegen.triton.plan import DTYPES, Plan, padded

JOIN = "join_parts"
"""The name of the second kernel."""
JOINED = (
    "part_acc", "part_m", "part_l", "starts", "out", "lse", "Hq", "Hkv", "splits", "shares", "lanes",
    "tokens",
)  # fmt: skip
"""Its arguments in order; `lse` `[Hq, tokens]` may be None."""
TOGETHER = 16
"""How many parts it looks at together."""
COLUMNS = 512
"""The most columns of a result that one of its programs combines."""


@dataclasses.dataclass(frozen=True)
class DecodePlan(Plan):
    """`shared`: values are the first Dv elements of the keys. `window`: the most keys that a query sees
    (0: all). `kept`: the dtype of pages of 8 bits, which have scales; None: they have the queries' dtype.
    `page`: tokens of a page; 0: each row has one page, of any length."""

    shared: bool = False
    window: int = 0
    kept: torch.dtype | None = None
    page: int = 0

    @property
    def rest(self) -> int:
        """The number of a key's elements that are not part of its value."""
        return self.D - self.Dv if self.shared else 0


def emit_decode(plan: DecodePlan) -> Kernel:
    """The two kernels of a plan.

    Raises:
        UnsupportedError: the score program has an operation that cannot be emitted; says which.
    """
    return _DecodeEmitter(plan).kernel()


def arguments(plan: DecodePlan) -> tuple[str, ...]:
    """The first kernel's arguments in order: tensors, partial results, where rows lie, lengths, strides
    (pages: of page, head, token; new keys: of head, token), then as in `emit.arguments`."""
    return module.flat(_groups(plan))


def _groups(plan: DecodePlan) -> Groups:
    pages, new = (("key",), ("new_key",)) if plan.shared else (("key", "value"), ("new_key", "new_value"))
    scales = tuple(f"{name}_scale" for name in pages) if plan.kept else ()
    strides = [("query", "hsd"), *((t, "phsd") for t in pages), *((t, "hsd") for t in new)]
    strides += [(name, "phs") for name in scales]
    return [
        ("query", *pages, *new, *scales), ("part_acc", "part_m", "part_l"),
        ("table", "starts", "first", "held"),
        ("Hq", "Hkv", "columns", "page", "splits", "news"),
        *(tuple(f"{tensor}_{axis}" for axis in axes) for tensor, axes in strides), *names_of_reads(plan),
    ]  # fmt: skip


class _DecodeEmitter(Emitter):
    plan: DecodePlan
    splits = False

    def __init__(self, plan: DecodePlan) -> None:
        super().__init__(plan)
        self.name = f"decode_{self.name}"
        self.rest = padded(plan.rest) if plan.rest else 0
        if plan.shared:
            self.D = self.Dv

    @property
    def width(self) -> int:
        """The number of a key's elements that its first tile holds."""
        return self.plan.Dv if self.plan.shared else self.plan.D

    def kernel(self) -> Kernel:
        held, news = self.body_of("held"), self.body_of("new")
        start = self.start()
        lines = [*self.begin(), *self.writer.before, *start]
        lines += ["for start in tl.range(since, until, BLOCK_K):  # in pages", *indented(held)]
        lines += ["for start in tl.range(kept, kept + fresh, BLOCK_K):  # new tokens", *indented(news)]
        lines += self.leave()
        first = module.function(self.name, _groups(self.plan), self.contract, lines)
        functions = [*([] if self.is_shared_out else [self.step()]), first, self.join()]
        return module.assemble(self.name, _groups(self.plan), self.header(), self.writer.calls, functions)

    contract = "Some queries of one row over one part of its keys: their sum, maximum and normaliser."

    def header(self) -> str:
        plan = self.plan
        title = f"{self.name}, written by attngraph. For each row b, head h, query at q and key at k"
        values = f"value its first {plan.Dv}" if plan.shared else f"value [pages, Hkv, page, {plan.Dv}]"
        about = [
            f"query [Hq, tokens, {plan.D}], key [pages, Hkv, page, {plan.D}], {values};",
            f"{DTYPES[plan.dtype]}, Hkv = {self.heads_of_keys}; out [tokens, Hq, {plan.Dv}] in memory.",
        ]
        if plan.kept:
            name = str(plan.kept).removeprefix("torch.")
            about.append(f"Pages are {name}; their scales [pages, Hkv, page] are float32.")
        constants = [f"PAGE = tl.constexpr({plan.page})"] if plan.page else []
        return module.header(title, plan, about, [*(module.rate(plan) or [module.LOG2E]), *constants])

    def begin(self) -> list[str]:
        """Lines that determine this program's row, queries and part of the keys."""
        plan = self.plan
        long = "tl.cast({}, tl.int64)".format if plan.wide else str
        lines = [
            "place = tl.program_id(0)",
            "part, item = place % splits, place // splits",
            "shares = tl.num_programs(1)",
            "share = tl.program_id(1)",
            "kv, b = item % Hkv, item // Hkv",
            "begin = tl.load(starts + b)",
            "count = tl.cast(tl.load(starts + b + 1) - begin, tl.int32)",
            "kept = tl.cast(tl.load(held + b), tl.int32)",
            "lane = share * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]  # [BLOCK_Q, 1]: heads, then queries",
            "queries = tl.maximum(count, 1)",
            f"inside = lane < {plan.group} * count",
            f"h = tl.minimum(kv * {plan.group} + lane // queries, Hq - 1)",
            f"q = {long('tl.cast(tl.load(first + b), tl.int32)')} + lane % queries",
            "across = tl.arange(0, BLOCK_K)[None, :]",
            "down = tl.arange(0, BLOCK_K)[:, None]",
            f"d = tl.cast(tl.arange(0, {self.D}), tl.int64)[None, :]",
        ]  # fmt: skip
        if not plan.shared and plan.Dv != plan.D:
            lines.append(f"dv = tl.cast(tl.arange(0, {self.Dv}), tl.int64)[None, :]")
        if self.rest:
            lines.append(f"rest = {plan.Dv} + tl.cast(tl.arange(0, {self.rest}), tl.int64)[None, :]")
        lines += [
            "query_row = query + tl.cast(h, tl.int64) * query_h + (begin + lane % queries) * query_s",
            f"query_tile = tl.load(query_row + d * query_d, mask={self.masked('inside', 'd')}, other=0.0)",
        ]
        if self.rest:
            mask = self.masked("inside", "rest")
            lines.append(f"query_rest = tl.load(query_row + rest * query_d, mask={mask}, other=0.0)")
        oldest = "tl.maximum(kept - room, 0)"
        if plan.window:
            oldest = f"tl.maximum({oldest}, tl.cast(tl.load(first + b), tl.int32) - {plan.window - 1})"
        return [
            *lines,
            f"room = columns * {'PAGE' if plan.page else 'page'}  # tokens; a ring, if a row has more",
            *([] if plan.page else ["number = tl.load(table + b)"]),
            f"oldest = {oldest}",
            "length = tl.cdiv(tl.cdiv(kept - oldest, splits), BLOCK_K) * BLOCK_K",
            "since = oldest + part * length",
            f"is_idle = share * BLOCK_Q >= {plan.group} * count  # a row with fewer new tokens than others",
            "until = tl.where(is_idle, since, tl.minimum(since + length, kept))",
            "fresh = tl.where((news != 0) & (part == splits - 1) & (not is_idle), count, 0)",
        ]

    def masked(self, rows: str, columns: str) -> str:
        """The mask of a tile: rows in range, and columns where the width is padded."""
        widths = {"d": (self.width, self.D), "dv": (self.plan.Dv, self.Dv), "rest": (self.plan.D, None)}
        width, tile = widths[columns]
        padded_width = self.plan.rest != self.rest if columns == "rest" else width != tile
        return f"({rows}) & ({columns} < {width})" if padded_width else rows

    def body_of(self, source: str) -> list[str]:
        """One tile of keys: its scores, and its step of the online softmax."""
        plan, writer = self.plan, self.writer
        writer.begin_body()
        statements = list(plan.statements)
        for statement in statements:
            writer.assign("s", statement)
        multiple = writer.real(self.multiple.factor)
        prefix, end = ("", "until") if source == "held" else ("new_", "kept + fresh")
        k = "start + across"
        lines = [f"k = tl.cast({k}, tl.int64)" if plan.wide else f"k = {k}", f"there = start + down < {end}"]
        if source == "held":
            lines += ["slot = start % room + down", "slot = tl.where(slot < room, slot, slot - room)"]
            if plan.page:
                entry = "table + b * columns + slot // PAGE"
                lines += [f"number = tl.load({entry}, mask=there, other=0)", "slot = slot % PAGE"]
            lines += [*self.rows("key", "number * key_p", "tl.cast(slot, tl.int64)"), *self.scales("key")]
        else:
            lines += self.rows("new_key", "", "(begin + start - kept + down)")
        lines.append(self.load_tile("key", prefix, "d"))
        if self.rest:
            lines.append(self.load_tile("key", prefix, "rest"))
        lines += [*self.product(statements), *writer.inside]
        lines.append(f"s = tl.where(k < {end}, s, {NEGATIVE_INFINITY})")
        value = "key_tile"
        if not plan.shared:
            place = ("number * value_p", "tl.cast(slot, tl.int64)")
            lines += self.rows(
                f"{prefix}value", *(place if source == "held" else ("", "(begin + start - kept + down)"))
            )
            lines += self.scales("value") if source == "held" else []
            lines.append(self.load_tile("value", prefix, "d" if plan.Dv == plan.D else "dv"))
            value = "value_tile"
        if self.is_shared_out:
            more = [] if self.multiple.is_plain else [f"multiple = {multiple}"]
            return [*lines, *more, *self.weighed_apart(end, value)]
        factor = "" if self.multiple.is_plain else f"{multiple}, "
        return [*lines, f"m, l, acc = absorb(m, l, acc, s, {factor}{value})"]

    def dot(self) -> str:
        """The smaller product comes first, which feeds the other (`weighed_apart`)."""
        if not (self.rest and self.is_shared_out):
            return super().dot()
        first = f"tl.dot(query_rest, tl.trans(key_rest){self.exact})"
        return f"tl.dot(query_tile, tl.trans(key_tile), {first}{self.exact})"

    @property
    def is_shared_out(self) -> bool:
        """Whether a tile has fewer rows than warp groups multiply, so that its columns must be shared out."""
        return self.plan.blocks.q >= 64 and 16 * self.plan.blocks.warps > self.plan.blocks.q

    def weighed_apart(self, end: str, value: str) -> list[str]:
        """A tile's step of the online softmax, with weights in a branch, which is taken always. Where Triton
        sees that a product is made of another's results, it gives every warp group all columns of the first,
        and two groups on the same 64 rows compute the same scores; it does not look into branches."""
        weights = [f"w = tl.exp2({self.exponents})", f"shrink = tl.exp2({self.fall})"]
        return [
            f"if start < {end}:",
            *indented([self.top, *weights, *self.summed(value), "m = top"]),
            "else:",
            f"    w = tl.zeros([BLOCK_Q, BLOCK_K], {value}.dtype)",
            "    shrink = tl.zeros([BLOCK_Q, 1], tl.float32)",
            f"acc = tl.dot(w, {value}, acc * shrink{self.exact})",
        ]

    def rows(self, name: str, page: str, token: str) -> list[str]:
        """The addresses of a tile's keys."""
        page = f" + {page}" if page else ""
        code = f"{name}_rows = {name}{page} + tl.cast(kv, tl.int64) * {name}_h + {token} * {name}_s"
        return [code]

    def scales(self, name: str) -> list[str]:
        """The scales of a tile of pages of 8 bits, one for each row."""
        if not self.plan.kept:
            return []
        place = f"number * {name}_scale_p + tl.cast(kv, tl.int64) * {name}_scale_h"
        place += f" + tl.cast(slot, tl.int64) * {name}_scale_s"
        return [f"{name}_by = tl.load({name}_scale + {place}, mask=there, other=0.0)"]

    def load_tile(self, name: str, prefix: str, columns: str) -> str:
        tile = f"{name}_rest" if columns == "rest" else f"{name}_tile"
        address = f"{prefix}{name}_rows + {columns} * {prefix}{name}_d"
        mask = self.masked("there", columns)
        if prefix or not self.plan.kept:
            return f"{tile} = tl.load({address}, mask={mask}, other=0.0)"
        numbers = f"tl.load({address}, mask={mask}, other=0)"
        wide = f"{numbers}.to(tl.float32)"
        if self.plan.kept.is_floating_point:
            wide = f"from_float8({numbers})"
            self.writer.calls.add("from_float8")
        return f"{tile} = ({wide} * {name}_by).to(query_tile.dtype)"

    def start(self) -> list[str]:
        """A sink is counted once: in the first part."""
        lines = super().start()
        if self.plan.program.sink is None:
            return lines
        return [lines[0], f"sink = tl.where(part == 0, sink, {NEGATIVE_INFINITY})", *lines[1:]]

    def leave(self) -> list[str]:
        """Store this part's results."""
        row = "(tl.cast(place, tl.int64) * shares + share) * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]"
        columns = "d" if self.plan.Dv == self.width else "dv"
        mask = f", mask={self.masked('inside', columns)}"
        return [
            f"row = {row}",
            f"tl.store(part_acc + row * {self.plan.Dv} + {columns}, acc{mask})",
            "tl.store(part_m + row, m)",
            "tl.store(part_l + row, l)",
        ]

    def join(self) -> str:
        """The second kernel: combines the parts of one query's result. A program has some columns of it, and
        looks at several parts at once."""
        plan = self.plan
        weigh = "tl.exp2(own - base)" if plan.is_linear else "tl.exp2((own - base) * LOG2E)"
        result = "acc / l" if self.multiple.keeps_nan else "tl.where(l > 0.0, acc / l, 0.0)"
        sums = f"(top + tl.log2(l)) * {math.log(2)!r}" if plan.is_linear else "top + tl.log(l)"
        is_whole = plan.Dv % self.columns == 0
        mask = "there" if is_whole else f"there & (d < {plan.Dv})"
        return "\n".join([
            "@triton.jit",
            f"def {JOIN}({', '.join(JOINED)}):",
            '    """Parts weigh as much as their share of the normaliser; 0 / 0 (no key at all) is NaN."""',
            *indented([
                "item, lane = tl.program_id(0) // lanes, tl.program_id(0) % lanes",
                "kv, b = item % Hkv, item // Hkv",
                "begin = tl.load(starts + b)",
                "count = tl.cast(tl.load(starts + b + 1) - begin, tl.int32)",
                "queries = tl.maximum(count, 1)",
                f"inside = lane < {plan.group} * count",
                f"h = kv * {plan.group} + lane // queries",
                "parts = tl.where(inside, splits, 0)",
                f"across = tl.arange(0, {TOGETHER})[:, None]",
                f"d = tl.program_id(1) * {self.columns} + tl.arange(0, {self.columns})[None, :]",
                "first = (tl.cast(item * splits, tl.int64) * shares + lane // BLOCK_Q) * BLOCK_Q",
                "rows = first + lane % BLOCK_Q + tl.cast(across, tl.int64) * shares * BLOCK_Q",
                "step = tl.cast(shares, tl.int64) * BLOCK_Q",
                f"m = tl.zeros([{TOGETHER}, 1], tl.float32) + {NEGATIVE_INFINITY}",
                f"for start in tl.range(0, parts, {TOGETHER}):",
                "    there = start + across < parts",
                f"    own = tl.load(part_m + rows + start * step, mask=there, other={NEGATIVE_INFINITY})",
                "    m = tl.maximum(m, own, propagate_nan=tl.PropagateNan.ALL)",
                "top = tl.max(m, 0, keep_dims=True)",
                f"base = tl.where(top == {NEGATIVE_INFINITY}, 0.0, top)",
                f"l = tl.zeros([{TOGETHER}, 1], tl.float32)",
                f"acc = tl.zeros([{TOGETHER}, {self.columns}], tl.float32)",
                f"for start in tl.range(0, parts, {TOGETHER}):",
                "    there = start + across < parts",
                "    row = rows + start * step",
                f"    own = tl.load(part_m + row, mask=there, other={NEGATIVE_INFINITY})",
                f"    weight = {weigh}",
                "    l += tl.load(part_l + row, mask=there, other=0.0) * weight",
                f"    tile = tl.load(part_acc + row * {plan.Dv} + d, mask={mask}, other=0.0)",
                "    acc += tile * weight",
                "l = tl.sum(l, 0, keep_dims=True)",
                "acc = tl.sum(acc, 0, keep_dims=True)",
                f"place = out + ((begin + lane % queries) * Hq + h) * {plan.Dv} + d",
                f"there = d < tl.where(inside, {plan.Dv}, 0)",
                f"tl.store(place, ({result}).to(out.dtype.element_ty), mask=there)",
                "if lse is not None:",
                "    one = tl.zeros([1, 1], tl.int64)",
                "    place = lse + tl.cast(h, tl.int64) * tokens + begin + lane % queries + one",
                "    is_first = inside & (tl.program_id(1) == 0)",
                f"    tl.store(place, {sums}, mask=one < tl.where(is_first, 1, 0))",
            ]),
        ])  # fmt: skip

    @property
    def columns(self) -> int:
        """The columns of a result that one program of the second kernel combines."""
        return min(COLUMNS, self.Dv)
