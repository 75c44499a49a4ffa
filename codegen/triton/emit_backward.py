"""A plan as the Triton source of its backward pass: kernels of one loop each, without atomics.

As in FlashAttention-2 (Dao 2023, algorithm 2) weights are computed again from the scores and the rows'
log-sum-exp (`emit_gradients.py`), but in two kernels. In the first, each program owns a block of queries
and sums dq over the keys (where a log-sum-exp is far from zero, it sums the row's weights before). In the
second, each program owns a block of keys and sums dk and dv over the queries of all its heads. Both sum
gradients of reads by rows or by columns (`read_gradients.py`); a read indexed by both the query and the key
has a kernel of its own. The order of sums is fixed, so the same call gives the same gradients.
"""

from __future__ import annotations

from attngraph.codegen.scalar.read_gradients import COLUMNS, PAIRS, ROWS, read_gradients
from attngraph.codegen.scalar.writer import PRODUCT
from attngraph.codegen.triton import module
from attngraph.codegen.triton.emit import ABOUT_LISTS, LISTS, strides_of
from attngraph.codegen.triton.emit_gradients import TileEmitter
from attngraph.codegen.triton.module import Groups, Kernel, indented, names_of_reads
from attngraph.codegen.triton.plan import BackwardPlan, stays_trusted
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import format_expr

OF_QUERIES, OF_KEYS, OF_READ = "gradient_of_queries", "gradients_of_keys", "gradient_of_read"
"""The names of the kernels; the last with the number of the read in `read_gradients`."""
_TENSORS = ("query", "key", "value", "grad")
_PAIRS = ("B", "batch", "first_row", "sums_owner", "sums_row")
"""Arguments for kernels of single pairs: where the sums that they store begin, and their strides."""
_LISTS = (*LISTS, "column_tiles", "column_counts", "column_b", "column_h")
"""Arguments where masks leave tiles out: lists of a block of queries' blocks of keys, and the reverse."""


def emit_backward(plan: BackwardPlan) -> Kernel:
    """The kernels of a plan, which have the same arguments; `name` is that of the first.

    Raises:
        UnsupportedError: the program has an operation whose derivative cannot be emitted; says which.
    """
    return _BackwardEmitter(plan).kernel()


def arguments(plan: BackwardPlan) -> tuple[str, ...]:
    """The arguments of each kernel in order: tensors, numbers per row (`tops` and `totals`, which the first
    kernel computes for the others), the gradient that a row without keys gives to all values (`unseen`
    `[B, Hkv]`: NaN, like its weights, or zero), results (dense), lengths, strides, outputs of sums for reads,
    arguments of kernels of pairs, then reads and sizes as in `emit.arguments`."""
    return module.flat(_groups(plan))


def _groups(plan: BackwardPlan) -> Groups:
    return [
        _TENSORS, _rows(plan), ("unseen", "grad_query", "grad_key", "grad_value"), ("Hq", "Sq", "Skv"),
        *strides_of(*_TENSORS), _LISTS if plan.listed else (), _arguments_for_reads(plan),
        *names_of_reads(plan),
    ]  # fmt: skip


def _rows(plan: BackwardPlan) -> tuple[str, ...]:
    return ("lse", "delta", *(() if stays_trusted(plan.program) else ("tops", "totals")))


def _arguments_for_reads(plan: BackwardPlan) -> tuple[str, ...]:
    found = read_gradients(plan.program, plan.wanted)
    sums = tuple(f"sums{number}" for number in range(len(found)))
    return (*sums, *(_PAIRS if any(read.kind == PAIRS for read in found) else ()))


class _BackwardEmitter(TileEmitter):
    plan: BackwardPlan

    def kernel(self) -> Kernel:
        pairs = self.numbers(PAIRS)
        found = [
            (OF_QUERIES, "dq of a block of queries, over its keys.", self.of_queries()),
            (OF_KEYS, "dk and dv of a block of keys, over the queries of all its heads.", self.of_keys()),
            *((f"{OF_READ}{i}", self.pairs_in_words(i), self.of_pairs(i)) for i in pairs),
        ]  # fmt: skip
        functions = [module.function(name, _groups(self.plan), words, lines) for name, words, lines in found]
        return module.assemble(OF_QUERIES, _groups(self.plan), self.header(), self.writer.calls, functions)

    def pairs_in_words(self, number: int) -> str:
        return (
            f"Gradient of `{format_expr(self.reads[number].node)}`, of a tile of pairs of a query and a key."
        )

    def numbers(self, kind: str) -> list[int]:
        """Numbers of the reads' gradients of a kind: summed by rows, by columns or by pairs."""
        return [number for number, read in enumerate(self.reads) if read.kind == kind]

    def header(self) -> str:
        title = f"{self.name}, backward, written by attngraph. For each batch b, head h, query q and key k"
        about = [
            *self.operands_in_words(),
            f"Hkv = {self.heads_of_keys}; grad like out, lse and delta [B, Hq, Sq]; results dense.",
            *([ABOUT_LISTS] if self.plan.listed else []),
        ]
        return module.header(title, self.plan, about, [module.LOG2E, *module.rate(self.plan)])

    def long(self, code: str) -> str:
        return f"tl.cast({code}, tl.int64)" if self.plan.wide else code

    # --- the two kernels ---

    def places(self, axis: str) -> list[str]:
        plan = self.plan
        widths = [f"d = tl.cast(tl.arange(0, {self.D}), tl.int64)[None, :]"]
        if plan.Dv != plan.D:
            widths.append(f"dv = tl.cast(tl.arange(0, {self.Dv}), tl.int64)[None, :]")
        heads = "Hq" if axis == "q" or plan.group == 1 else f"(Hq // {plan.group})"
        owner = "h" if axis == "q" else "kv"
        return [
            "place = tl.program_id(0)",
            f"blocks = tl.cdiv({'Sq' if axis == 'q' else 'Skv'}, BLOCK_{axis.upper()})",
            f"first = place % blocks * BLOCK_{axis.upper()}",
            f"b = {self.long(f'place // blocks // {heads}')}",
            f"{owner} = {self.long(f'place // blocks % {heads}')}",
            *widths,
        ]

    def of_queries(self) -> list[str]:
        summed = self.numbers(ROWS)
        tile, _ = self.tile(summed, within="k < Skv")  # rows beyond the end are not stored
        first, look, last = ([], [], []) if self.is_trusted else self.far_rows()
        before = list(self.writer.before)
        stop, lines = self.limit("k") if self.plan.listed else self.stop()
        keys = [
            f"k = {self.long('start + tl.arange(0, BLOCK_K)[None, :]')}",
            "at = start + tl.arange(0, BLOCK_K)[:, None]",
        ]
        body = [
            *keys, *self.tiles_of_keys(), *tile, self.added("sum", "ds", "key_tile"),
            *(f"sum{i} += tl.sum(of_read{i}, 1, keep_dims=True)" for i in summed),
        ]  # fmt: skip
        if not self.is_trusted:
            # The queries are loaded inside, so that they do not occupy registers in both loops.
            body_of_look = [*keys, *self.tile_of_queries(), *self.tile_of_keys("key"), *look]
            look = self.over("k", "0", f"tl.where(is_far, {stop}, 0)", body_of_look, ", num_stages=1")
            last += [f"tl.store({name}s + row, row_{name}, mask=q < Sq)" for name in ("top", "total")]
            first = ["# A log-sum-exp far from zero holds too few digits: such rows are summed anew.", *first]
        return [
            *self.places("q"),
            f"kv = {self.group}",
            f"q = {self.long('first + tl.arange(0, BLOCK_Q)[:, None]')}",
            "row = tl.cast(place // blocks, tl.int64) * Sq + q",
            "row_lse = tl.load(lse + row, mask=q < Sq, other=0.0)",
            *before, *lines, *first, *look, *last, *self.rows_of_queries(),
            f"sum = tl.zeros([BLOCK_Q, {self.D}], tl.float32)",
            *(f"sum{i} = tl.zeros([BLOCK_Q, 1], tl.float32)" for i in summed),
            *self.over("k", "0", stop, body),
            f"result = grad_query + row * {self.plan.D} + d",
            "tl.store(result, sum.to(grad_query.dtype.element_ty), "
            f"mask={self.inside('q < Sq', 'd')})",
            *(f"tl.store(sums{i} + row, sum{i}, mask=q < Sq)" for i in summed),
        ]  # fmt: skip

    def of_keys(self) -> list[str]:
        summed = self.numbers(COLUMNS)
        tile, before = self.tile(summed)
        begin, lines = ("0", []) if self.plan.listed else self.begin_of_queries()
        stop, limit = self.limit("q") if self.plan.listed else ("tl.cdiv(Sq, BLOCK_Q)", [])
        body = [
            f"q = {self.long('start + tl.arange(0, BLOCK_Q)[:, None]')}",
            *self.numbers_of_rows(), *self.rows_of_queries(), *before, *tile,
            self.added("sum_value", "tl.trans(p)", "grad_tile"),
            self.added("sum_key", "tl.trans(ds)", "query_tile"),
            *(f"sum{i} += tl.sum(of_read{i}, 0, keep_dims=True)" for i in summed),
        ]  # fmt: skip
        column = "(tl.cast(b, tl.int64) * Hq + h) * Skv + k"
        heads = [
            f"h = kv * {self.plan.group} + member" if self.plan.group > 1 else "h = kv",
            *(f"sum{i} = tl.zeros([1, BLOCK_K], tl.float32)" for i in summed),
            *limit, *self.over("q", begin, stop, body),
            *(f"tl.store(sums{i} + {column}, sum{i}, mask=k < Skv)" for i in summed),
        ]  # fmt: skip
        if self.plan.group > 1:
            heads = [f"for member in range({self.plan.group}):", *indented(heads)]
        row, stores = "(tl.cast(place // blocks, tl.int64) * Skv + at)", []
        for name, columns, width in (("key", "d", self.plan.D), ("value", self.dv, self.plan.Dv)):
            total = f"sum_{name}"
            if name == "value" and self.multiple.keeps_nan:
                total = "(sum_value + tl.load(unseen + place // blocks))"
            stores += [
                f"result = grad_{name} + {row} * {width} + {columns}",
                f"tl.store(result, {total}.to(grad_{name}.dtype.element_ty), "
                f"mask={self.inside('at < Skv', columns)})",
            ]
        return [
            *self.places("k"),
            "at = first + tl.arange(0, BLOCK_K)[:, None]",
            f"k = {self.long('first + tl.arange(0, BLOCK_K)[None, :]')}",
            *self.tiles_of_keys(), *lines,
            f"sum_key = tl.zeros([BLOCK_K, {self.D}], tl.float32)",
            f"sum_value = tl.zeros([BLOCK_K, {self.Dv}], tl.float32)",
            *heads, *stores,
        ]  # fmt: skip

    def limit(self, axis: str) -> tuple[str, list[str]]:
        """The number of blocks listed for a block of queries, or of keys."""
        own, (_, counts, b, h) = ("BLOCK_Q", _LISTS[:4]) if axis == "k" else ("BLOCK_K", _LISTS[4:])
        return "stop", [
            f"line = tl.cast(b, tl.int64) * {b} + tl.cast(h, tl.int64) * {h} + first // {own}",
            f"stop = tl.load({counts} + 2 * line + 1)",
        ]

    def over(self, axis: str, begin: str, stop: str, body: list[str], options: str = "") -> list[str]:
        """A loop over a block of queries' blocks of keys, or over a block of keys' blocks of queries."""
        block, extent = ("BLOCK_K", "Skv") if axis == "k" else ("BLOCK_Q", "Sq")
        start = f"start = i * {block}"
        if self.plan.listed:
            tiles = _LISTS[0] if axis == "k" else _LISTS[4]
            start = f"start = tl.load({tiles} + line * tl.cdiv({extent}, {block}) + i) * {block}"
        return [f"for i in tl.range({begin}, {stop}{options}):", *indented([start, *body])]

    def of_pairs(self, number: int) -> list[str]:
        """A read's own kernel: each program sums one tile over the batches and heads by which the read is not
        indexed. The grid has those by which it is, blocks of keys and blocks of queries."""
        tile, before = self.tile([number])
        shift, lines = self.shift()
        each_batch, each_head = self.reads[number].owned
        b, h = {
            (True, True): ("batch + owner // Hq", "owner % Hq"), (True, False): ("batch + owner", "member"),
            (False, True): ("member", "owner"), (False, False): ("member // Hq", "member % Hq"),
        }[each_batch, each_head]  # fmt: skip
        count = {(True, True): "1", (True, False): "Hq", (False, True): "B", (False, False): "B * Hq"}
        members = count[each_batch, each_head]
        if self.plan.diagonal is not None:
            members = f"tl.where(first < start + BLOCK_Q{_summand(shift)}, {members}, 0)"
        body = [
            f"b = {self.long(b)}", f"h = {self.long(h)}", f"kv = {self.group}",
            *self.numbers_of_rows(), *self.rows_of_queries(), *self.tiles_of_keys(), *before, *tile,
            f"sum += of_read{number}",
        ]  # fmt: skip
        width = [f"dv = tl.cast(tl.arange(0, {self.Dv}), tl.int64)[None, :]"]
        return [
            "owner = tl.program_id(0)",
            "first = tl.program_id(1) * BLOCK_K",
            "row_in_sums = tl.program_id(2) * BLOCK_Q",
            "start = first_row + row_in_sums",
            f"d = tl.cast(tl.arange(0, {self.D}), tl.int64)[None, :]",
            *(width if self.plan.Dv != self.plan.D else []),
            f"q = {self.long('start + tl.arange(0, BLOCK_Q)[:, None]')}",
            "at = first + tl.arange(0, BLOCK_K)[:, None]",
            f"k = {self.long('first + tl.arange(0, BLOCK_K)[None, :]')}",
            *lines,
            "sum = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)",
            f"for member in tl.range(0, {members}):", *indented(body),
            "result = tl.cast(owner, tl.int64) * sums_owner + k",
            "result += tl.cast(row_in_sums + tl.arange(0, BLOCK_Q), tl.int64)[:, None] * sums_row",
            f"tl.store(sums{number} + result, sum, mask=k < Skv)",
        ]  # fmt: skip

    def stop(self) -> tuple[str, list[str]]:
        """The number of blocks of keys up to the last that any query of the block sees."""
        if self.plan.diagonal is None:
            return "tl.cdiv(Skv, BLOCK_K)", []
        shift, lines = self.shift()
        end = f"tl.minimum(first + BLOCK_Q{_summand(shift)}, Skv)"
        return "stop", [*lines, f"stop = tl.cdiv({end}, BLOCK_K)"]

    def begin_of_queries(self) -> tuple[str, list[str]]:
        """The first block of queries that see a key of the block."""
        if self.plan.diagonal is None:
            return "0", []
        shift, lines = self.shift()
        begin = f"tl.maximum(first - {shift}, 0)" if shift else "first"
        return "begin", [*lines, f"begin = {begin} // BLOCK_Q"]

    def shift(self) -> tuple[str, list[str]]:
        """How many keys after its own position a query sees ("": none), and the lines that compute it."""
        if self.plan.diagonal is None or self.plan.diagonal[1] is E.ZERO:
            return "", []
        self.writer.forget()
        code = self.writer.integer(self.plan.diagonal[1], PRODUCT)
        return (f"tl.cast({code}, tl.int64)" if self.plan.wide else code), self.writer.before


def _summand(code: str) -> str:
    return f" + {code}" if code else ""
