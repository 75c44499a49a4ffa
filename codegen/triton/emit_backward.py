"""A plan as the Triton source of its backward pass: kernels without atomics.

As in FlashAttention-2 (Dao 2023, algorithm 2) weights are computed again from the scores and the rows'
log-sum-exp (`emit_gradients.py`), but in two kernels. In the first, each program owns a block of queries
and sums dq over the keys (where a log-sum-exp is far from zero, it sums the row's weights before). In the
second, each program owns a block of keys and sums dk and dv over the queries of all its heads. What a
program owns is the rows of its tiles of scores: the second kernel computes tiles transposed, so that they are
multiplied by queries and gradients as they are. As in the forward pass, one loop takes whole tiles and one
those at an edge. Both kernels sum gradients of reads by rows or by columns (`read_gradients.py`); a read
indexed by both the query and the key has a kernel of its own. The order of sums is fixed, so the same call
gives the same gradients.
"""

from __future__ import annotations

from attngraph.codegen.scalar.read_gradients import COLUMNS, PAIRS, ROWS, read_gradients
from attngraph.codegen.scalar.writer import PRODUCT
from attngraph.codegen.triton import module
from attngraph.codegen.triton.emit import ABOUT_LISTS, INFINITY, LISTS, strides_of
from attngraph.codegen.triton.emit_gradients import WITHIN, TileEmitter
from attngraph.codegen.triton.module import Groups, Kernel, indented, names_of_reads
from attngraph.codegen.triton.plan import BackwardPlan, stays_trusted
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import format_expr

OF_QUERIES, OF_KEYS, OF_READ = "gradient_of_queries", "gradients_of_keys", "gradient_of_read"
"""The names of the kernels; the last with the number of the read in `read_gradients`."""
_TENSORS = ("query", "key", "value", "grad", "out")
_STRIP = 1024
"""How many numbers of rows are loaded at a time to find the lowest."""
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
    """The arguments of each kernel in order: tensors, numbers per row (`delta`, `tops` and `totals`, which
    the first kernel computes for the others), the gradient that a row without keys gives to all values
    (`unseen` `[B, Hkv]`, zeros; where there is such a row, the first kernel makes it NaN, as its weights
    are), results (dense), lengths, strides, sums for reads,
    arguments of kernels of pairs, then reads and sizes as in `emit.arguments`."""
    return module.flat(_groups(plan))


def _groups(plan: BackwardPlan) -> Groups:
    return [
        _TENSORS, _rows(plan), ("unseen", "grad_query", "grad_key", "grad_value"), ("Hq", "Sq", "Skv"),
        *strides_of(*_TENSORS), _LISTS if plan.listed else (), _arguments_for_reads(plan),
        *names_of_reads(plan),
    ]  # fmt: skip


def _rows(plan: BackwardPlan) -> tuple[str, ...]:
    return ("lse", "grad_lse", "delta", *(() if stays_trusted(plan.program) else ("tops", "totals")))


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
            f"Hkv = {self.heads_of_keys}; grad like out, numbers of rows [B, Hq, Sq]; results dense.",
            *([ABOUT_LISTS] if self.plan.listed else []),
            "A tile has OWN queries and OTHER keys; in the kernel of keys, OWN keys and OTHER queries.",
        ]
        constants = [module.LOG2E, *module.rate(self.plan)]
        return module.header(title, self.plan, about, constants, (self.extents))

    def long(self, code: str) -> str:
        return f"tl.cast({code}, tl.int64)" if self.plan.wide else code

    # --- the two kernels ---

    def places(self, axis: str) -> list[str]:
        """Lines that determine the block of queries, or of keys, and the head that a program owns."""
        plan = self.plan
        heads = "Hq" if axis == "q" or plan.group == 1 else f"(Hq // {plan.group})"
        owner = "h" if axis == "q" else "kv"
        return [
            "place = tl.program_id(0)",
            f"blocks = tl.cdiv({'Sq' if axis == 'q' else 'Skv'}, OWN)",
            f"first = {self.first(axis)}",
            f"b = {self.long(f'place // blocks // {heads}')}",
            f"{owner} = {self.long(f'place // blocks % {heads}')}",
            f"{axis} = {self.long('first + tl.arange(0, OWN)[:, None]')}",
            "across = tl.arange(0, OTHER)[None, :]",
            "down = tl.cast(tl.arange(0, OTHER), tl.int64)[:, None]",
            *self.widths(),
        ]

    def first(self, axis: str) -> str:
        """The first element that a program owns: blocks with the longest loops are launched first."""
        return (
            "(blocks - 1 - place % blocks) * OWN"
            if axis == "q" and self.plan.diagonal
            else "place % blocks * OWN"
        )

    def of_queries(self) -> list[str]:
        summed = self.numbers(ROWS)
        self.writer.forget()
        # Rows beyond the end are not stored.
        within = "across <= last_key - start" if self.at_the_end else "across < Skv - start"
        whole, edge = self.tile(summed), self.tile(summed, within)
        first, look, last = ([], [], []) if self.is_trusted else self.far_rows()
        before = list(self.writer.before)
        if not self.is_trusted:
            first = ["# A log-sum-exp far from zero holds too few digits: such rows are summed anew.", *first]
            look = self.loop_of_far_rows(look)
            last += [f"tl.store({name}s + row, row_{name}, mask=q < Sq)" for name in ("top", "total")]
        return [
            *self.places("q"),
            f"kv = {self.group}",
            "row = tl.cast(place // blocks, tl.int64) * Sq + q",
            "row_lse = tl.load(lse + row, mask=q < Sq, other=0.0)",
            *self.note_unseen(),
            *self.head("key", "kv", "down", "d"), *self.head("value", "kv", "down", self.dv),
            *before, *self.loop_bounds(), *self.last_keys(), *self.unless_low_rows(), *first, *look, *last,
            *self.rows_of_gradients(), *self.delta_of_rows(), *self.rows_of_queries(),
            f"sum = tl.zeros([OWN, {self.D}], tl.float32)",
            *(f"sum{i} = tl.zeros([OWN, 1], tl.float32)" for i in summed),
            *self.first_tile(),
            *self.loop("0", "whole", self.with_keys(whole, summed, edge=False)),
            *self.loop("whole", "stop", self.with_keys(edge, summed, edge=True), about="  # at an edge"),
            f"result = grad_query + row * {self.plan.D} + d",
            f"tl.store(result, {self.scaled('sum')}.to(grad_query.dtype.element_ty), "
            f"mask={self.inside('q < Sq', 'd')})",
            *(f"tl.store(sums{i} + row, sum{i}, mask=q < Sq)" for i in summed),
        ]  # fmt: skip

    def note_unseen(self) -> list[str]:
        """A row without keys spoils the gradient of all values. Which program says so does not matter."""
        if not self.multiple.keeps_nan:
            return []
        place = "place // blocks" + (f" // {self.plan.group}" if self.plan.group > 1 else "")
        return [
            f"lost = tl.max(tl.where(tl.abs(row_lse) < {INFINITY}, 0, 1))  # rows without keys",
            f'tl.store(unseen + {place}, float("nan"), mask=lost > 0)',
        ]

    def unless_low_rows(self) -> list[str]:
        """All tiles are visited if a row's log-sum-exp is near the fill: then keys behind it have weight."""
        if self.plan.fill is None:
            return []
        return [f"stop = {self.unless_low(f'tl.where(q < Sq, row_lse, {INFINITY})', 'stop', 'every')}"]

    def with_keys(self, tile: list[str], summed: list[int], edge: bool) -> list[str]:
        """One turn of the kernel of queries: load keys, compute their tile, add to the sums."""
        return [
            f"k = {self.long('start + across')}",
            *self.load("key", "d", edge), *self.load("value", self.dv, edge), *tile,
            self.added("sum", "ds", "key_tile"),
            *(f"sum{i} += tl.sum(of_read{i}, 1, keep_dims=True)" for i in summed),
        ]  # fmt: skip

    def loop_of_far_rows(self, tile: list[str]) -> list[str]:
        """It loads the queries itself, so that they do not occupy registers in all loops."""
        start = "tl.load(line + i)" if self.plan.listed else "i"
        return [
            "for i in tl.range(0, tl.where(is_far, stop, 0), num_stages=1):",
            *indented([
                f"start = {start} * OTHER", f"k = {self.long('start + across')}",
                *self.address("query", "h", "q", "d", "q < Sq"), *self.load("key", "d", True), *tile,
            ]),
        ]  # fmt: skip

    def of_keys(self) -> list[str]:
        summed = self.numbers(COLUMNS)
        whole, edge = self.with_queries(summed, edge=False), self.with_queries(summed, edge=True)
        heads = [
            f"h = kv * {self.plan.group} + member" if self.plan.group > 1 else "h = kv",
            *self.head("query", "h", "down", "d"), *self.head("grad", "h", "down", self.dv),
            *(f"sum{i} = tl.zeros([OWN, 1], tl.float32)" for i in summed),
            *self.loops_over_queries(whole, edge),
            *(f"tl.store(sums{i} + (tl.cast(b, tl.int64) * Hq + h) * Skv + k, sum{i}, mask=k < Skv)"
              for i in summed),
        ]  # fmt: skip
        if self.plan.group > 1:
            heads = [f"for member in range({self.plan.group}):", *indented(heads)]
        row, stores = "(tl.cast(place // blocks, tl.int64) * Skv + first + own)", []
        for name, columns, width in (("key", "d", self.plan.D), ("value", self.dv, self.plan.Dv)):
            total = self.scaled("sum_key") if name == "key" else "sum_value"
            if name == "value" and self.multiple.keeps_nan:
                total = "(sum_value + tl.load(unseen + place // blocks))"
            stores += [
                f"result = grad_{name} + {row} * {width} + {columns}",
                f"tl.store(result, {total}.to(grad_{name}.dtype.element_ty), "
                f"mask={self.inside('own < Skv - first', columns)})",
            ]
        stores = ["own = tl.arange(0, OWN)[:, None]", *stores]
        return [
            *self.places("k"),
            "at = k",
            *self.tiles_of_keys(), *self.first_queries(),
            f"sum_key = tl.zeros([OWN, {self.D}], tl.float32)",
            f"sum_value = tl.zeros([OWN, {self.Dv}], tl.float32)",
            *heads, *stores,
        ]  # fmt: skip

    def first_queries(self) -> list[str]:
        """The first query that sees each key, by the causal mask."""
        if not self.at_the_end:
            return []
        shift, lines = self.shift()
        return [*lines, f"first_query = k{f' - ({shift})' if shift else ''}  # [OWN, 1]"]

    def with_queries(self, summed: list[int], edge: bool) -> list[str]:
        """One turn of the kernel of keys: load queries, compute their tile, add to the sums."""
        self.writer.forget()
        delta = f"row_delta = tl.load(delta + row{', mask=q < Sq, other=0.0' if edge else ''})"
        row, *numbers = self.numbers_of_rows(edge)
        # Keys beyond the end are not stored.
        within, inside = "across < Sq - start", []
        if self.at_the_end:
            inside = [f"inside = (across >= first_query - start) & ({within})"] if edge else []
            within = "inside"
        tile = self.tile(summed, within if edge else "", True, numbers, [delta])
        return [
            f"q = {self.long('start + across')}", row, *inside,
            *self.load("query", "d", edge), *self.load("grad", self.dv, edge), *self.writer.before, *tile,
            self.added("sum_value", "p", "grad_tile"),
            self.added("sum_key", "ds", "query_tile"),
            *(f"sum{i} += tl.sum(of_read{i}, 1, keep_dims=True)" for i in summed),
        ]  # fmt: skip

    def loops_over_queries(self, whole: list[str], edge: list[str]) -> list[str]:
        """The loops over the blocks of queries that see keys of a block. Under a causal mask the first ones
        are at an edge, and so may the last be."""
        about, end = "  # at an edge", "tl.cdiv(Sq, OTHER)"
        if self.plan.listed:
            lines, inner, last, every = self.bounds_of_list(_LISTS[4:], "Sq")
            low = self.unless_low_queries("Sq", "stop", every)
            return [
                *lines, f"whole = {inner}", f"stop = {last}", *low, *self.first_tile(),
                *self.loop("0", "whole", whole), *self.loop("whole", "stop", edge, about=about),
            ]  # fmt: skip
        if self.plan.offset is None:
            # The edge comes first: in the other order Triton 3.6's products wait for each other (C7515).
            return [
                "whole = Sq // OTHER", f"stop = {end}",
                *self.loop("whole", "stop", edge, about=about), *self.loop("0", "whole", whole),
            ]  # fmt: skip
        shift, lines = self.shift()
        less = f" - {shift}" if shift else ""
        return [
            *lines,
            f"stop = {end}",
            f"begin = tl.maximum(first{less}, 0) // OTHER" if shift else "begin = first // OTHER",
            f"open = tl.cdiv(first + OWN - 1{less}, OTHER)  # from here on, queries see all keys",
            "open = tl.minimum(tl.maximum(open, begin), stop)",
            "whole = tl.maximum(Sq // OTHER, open)",
            *self.unless_low_queries("tl.minimum(begin * OTHER, Sq)", "begin", "0"),
            *self.loop("open", "whole", whole),
            *self.loop(
                "begin + whole - open", "stop", edge, "tl.where(i < whole, i - whole + open, i)", about
            ),
        ]

    def unless_low_queries(self, rows: str, name: str, otherwise: str) -> list[str]:
        """The same for a bound of the queries that keys visit, by the log-sum-exp of the first rows."""
        if self.plan.fill is None:
            return []
        return [
            f"lowest = tl.zeros([{_STRIP}], tl.float32) + {INFINITY}",
            f"for i in tl.range(0, tl.cdiv({rows}, {_STRIP})):",
            *indented([
                f"start = i * {_STRIP} + tl.arange(0, {_STRIP})",
                "some = lse + (tl.cast(b, tl.int64) * Hq + h) * Sq + start",
                f"lowest = tl.minimum(lowest, tl.load(some, mask=start < {rows}, other={INFINITY}))",
            ]),
            f"{name} = {self.unless_low('lowest', name, otherwise)}",
        ]  # fmt: skip

    def scaled(self, total: str) -> str:
        """A sum of gradients of dots, with the scale that tiles of linear programs leave out."""
        return f"({total} * {self.plan.program.scale!r})" if self.plan.is_linear else total

    def of_pairs(self, number: int) -> list[str]:
        """A read's own kernel: each program sums one tile over the batches and heads by which the read is not
        indexed. The grid has those by which it is, blocks of keys and blocks of queries."""
        self.writer.forget()
        tile = self.tile([number], within=WITHIN)
        before = list(self.writer.before)
        shift, lines = self.shift()
        each_batch, each_head = self.reads[number].owned
        b, h = {
            (True, True): ("batch + owner // Hq", "owner % Hq"), (True, False): ("batch + owner", "member"),
            (False, True): ("member", "owner"), (False, False): ("member // Hq", "member % Hq"),
        }[each_batch, each_head]  # fmt: skip
        count = {(True, True): "1", (True, False): "Hq", (False, True): "B", (False, False): "B * Hq"}
        members = count[each_batch, each_head]
        if self.plan.diagonal is not None:
            members = f"tl.where(first < start + OWN{_summand(shift)}, {members}, 0)"
        body = [
            f"b = {self.long(b)}", f"h = {self.long(h)}", f"kv = {self.group}",
            *self.numbers_of_rows(), "row_delta = tl.load(delta + row, mask=q < Sq, other=0.0)",
            *self.rows_of_queries(), *self.rows_of_gradients(), *self.tiles_of_keys(), *before, *tile,
            f"sum += of_read{number}",
        ]  # fmt: skip
        return [
            "owner = tl.program_id(0)",
            "first = tl.program_id(1) * OTHER",
            "row_in_sums = tl.program_id(2) * OWN",
            "start = first_row + row_in_sums",
            *self.widths(),
            f"q = {self.long('start + tl.arange(0, OWN)[:, None]')}",
            "at = first + tl.arange(0, OTHER)[:, None]",
            f"k = {self.long('first + tl.arange(0, OTHER)[None, :]')}",
            *lines,
            "sum = tl.zeros([OWN, OTHER], tl.float32)",
            f"for member in tl.range(0, {members}):", *indented(body),
            "result = tl.cast(owner, tl.int64) * sums_owner + k",
            "result += tl.cast(row_in_sums + tl.arange(0, OWN), tl.int64)[:, None] * sums_row",
            f"tl.store(sums{number} + result, sum, mask=k < Skv)",
        ]  # fmt: skip

    def shift(self) -> tuple[str, list[str]]:
        """How many keys after its own position a query sees ("": none), and the lines that compute it."""
        offset = self.plan.offset
        if offset is None or offset is E.ZERO:
            return "", []
        self.writer.forget()
        code = self.writer.integer(offset, PRODUCT)
        return (f"tl.cast({code}, tl.int64)" if self.plan.wide else code), self.writer.before


def _summand(code: str) -> str:
    return f" + {code}" if code else ""
