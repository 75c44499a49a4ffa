"""`cpu.decode`: new tokens of rows over a paged cache, by C emitted for the score program.

Supports the programs that `cpu.compiled` supports. The C reads keys and values from the pages in place, and
all rows are one call, so a row costs its own scores. The kernels for whole sequences pack keys once for all
queries and skip blocks, but take a call for each row, so they get the rows that are long enough to repay it
(`_Rows.are_long`). A decoding step calls this once per layer, so what does not change from call to call is
computed once (`_Prepared`).
"""

import threading
from typing import Any

import torch
from torch import Tensor

from attngraph.codegen.cpu import native, source
from attngraph.codegen.cpu.call import BLOCK_K, BLOCK_Q, Library, Run, library
from attngraph.codegen.cpu.native import Link
from attngraph.codegen.cpu.operands import OverCache, attention_fits, most_tokens, rows_fit, table_range
from attngraph.codegen.cpu.source import Plan
from attngraph.codegen.remarks import UnsupportedError
from attngraph.codegen.scalar.weights import is_multiple
from attngraph.ir.dtypes import FLOATS, SCALED
from attngraph.ir.language.score import ScoreProgram, Weight
from attngraph.ir.ops.cached_attention import Pair, Rows, counts, only, row_by_row
from attngraph.ir.ops.kernels import Reads, empty_result
from attngraph.meaning.masks.causal import examine

LONG = 1 << 24
"""Visible scores of a row, over all heads, from which the kernels for whole sequences take less time for it:
measured at 12 heads, where they are 0.95 as fast at 12 million scores, 1.6 times at 25, 2.4 times at 100."""
BATCHED = 128
"""New tokens of a row above which they do, where one call serves all rows: equally long, nothing kept."""
WIDEST = 1024
LEAST_KEYS = native.numbers("decode.h")["LEAST_KEYS"]
"""The fewest keys that a thread should get."""


class Decode:
    """`cpu.decode`."""

    name = "cpu.decode"

    def attend(self, *given: Any, **named: Any) -> Tensor | None:
        call = OverCache(*given, **named)
        q, lse = call.q, call.lse
        if not q.is_cpu or 0 in q.shape[2:]:  # dots of no width are zero: left to the general way
            return None
        about = _about(call.rows)
        are_long = [] if call.program.in_order else about.are_long(q.shape[1])
        if len(are_long) and all(are_long):
            return None
        made = _prepare(call)
        if made is None:
            return None
        if not any(are_long):
            return made.attend(call, about)
        out = _empty(call)
        for is_long in (False, True):
            tokens, rows = only([is_long == one for one in are_long], call.rows)
            k, v = (n if n.shape[2] == 0 else n.index_select(2, tokens) for n in call.new)
            here = q.index_select(2, tokens)
            sums = None if lse is None else lse.new_empty(here.shape[:3])
            own = call._replace(q=here, new=(k, v), rows=rows, lse=sums)
            part = row_by_row(*own[:7], "cpu", *own[7:]) if is_long else made.attend(own, _Rows(rows))
            if part is None:
                return None
            out.index_copy_(2, tokens, part)
            if lse is not None and sums is not None:
                lse.index_copy_(2, tokens, sums)
        return out

    def link(self, call: OverCache) -> Link | None:
        """The call that `attend` makes, ready to run; None if it is not supported."""
        q, about = call.q, _Rows(call.rows)
        are_long = not call.program.in_order and any(about.are_long(q.shape[1]))
        if not q.is_cpu or 0 in q.shape[2:] or are_long:
            return None
        made = _prepare(call)
        return None if made is None else made.link(call, about, torch.get_num_threads())

    @staticmethod
    def most_kept(call: OverCache) -> int:
        """The most kept tokens of a row for which a call like this is the faster way, and finds all that it
        reads at positions, even if all new tokens are the row's."""
        heads, tokens = call.q.shape[1:3]
        return min(LONG // (heads * tokens) - tokens // 2, most_tokens(call.program, call.reads) - tokens)

    def source(self, program: ScoreProgram, q: Tensor, pages: Pair, reads: Reads) -> str:
        plan = _plan(program, q, pages, reads) if q.is_cpu else None
        try:
            return "" if plan is None else source.write(plan).text
        except UnsupportedError:
            return ""


def _plan(program: ScoreProgram, q: Tensor, pages: Pair, reads: Reads) -> Plan | None:
    """The plan for such queries and pages; None if there is no C for them."""
    k, v = pages
    if q.dtype not in FLOATS or k.dtype != v.dtype or k.dtype not in (*FLOATS, *SCALED):
        return None
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return None
    dtypes, kept = tuple(r.dtype for r in reads), None if k.dtype == q.dtype else k.dtype
    return Plan(program.without_scale, q.dtype, dtypes, kept=kept)


def _empty(call: OverCache) -> Tensor:
    return empty_result(call.q, (*call.q.shape[:3], call.pages[1].shape[3]))


class _Prepared:
    """What calls of one program with operands of the same dtypes and widths share."""

    def __init__(self, made: Library, program: ScoreProgram) -> None:
        self.made, self.program = made, program
        self.scale = 1.0 if program.scale is None else program.scale
        by_weight = (s.value for s in program.statements if isinstance(s, Weight))
        exact = not all(map(is_multiple, by_weight))  # then keys without a weight may get one
        self.window = 0 if exact else examine(program, True, frozenset()).window or 0
        self.function = made.code.attngraph_decode

    def attend(self, given: OverCache, rows: "_Rows") -> Tensor | None:
        made = self.link(given, rows)
        if made is None:
            return None
        call = made.argument
        if given.lse is not None:
            call.lse = given.lse.data_ptr()
        items = self.items(given.q, given.pages[0], rows) * call.parts
        native.run(self.function, call, min(torch.get_num_threads(), items))
        return None if call.bad else made.results[0]

    @staticmethod
    def items(q: Tensor, k: Tensor, rows: "_Rows", whatever_lengths: bool = False) -> int:
        """How many blocks of queries and heads there are."""
        group = q.shape[1] // k.shape[1]
        step = _step(group)
        tokens = q.shape[2]
        most = min(tokens, (tokens + rows.count * (step - 1)) // step)  # however they are divided
        blocks = most if whatever_lengths else rows.blocks(step)
        return blocks * k.shape[1] * -(-group // BLOCK_Q)

    def link(self, given: OverCache, rows: "_Rows", at_once: int | None = None) -> Link | None:
        """The call, ready to run. With `at_once` threads, whatever the rows' lengths will be; else for these
        rows, by as many threads as there are items."""
        q, new, (k, v), scales = given.q, given.new, given.pages, given.scales
        if any((by is None) == (k.dtype in SCALED) for by in scales):
            return None
        keys = rows.keys if new[0].shape[2] else rows.longest
        if not rows.fit(q.shape[2], k.shape[0]) or not attention_fits(given, rows.count, rows.queries, keys):
            return None
        run = Run(self.made, self.program, (q, k, v), given.reads, tuple(given.sizes))
        if not (run.set_numbers() and run.set_reads()):
            return None
        are_copied = run.q is not q or run.k is not k or run.v is not v
        if at_once and (rows.copies or are_copied or any(t.stride(3) != 1 for t in new if t.shape[2])):
            return None  # copies would keep the values of this call
        (q, k, v), call = (run.q, run.k, run.v), run.call
        (_, h, _, d), dv = q.shape, v.shape[3]
        out = _empty(given)
        run.place(q=q, out=out)
        _move_pages(call, k, v, *scales)
        call.B, call.H, call.Hkv, call.Sq, call.D, call.Dv = rows.count, h, k.shape[1], q.shape[2], d, dv
        call.wide, call.scale = run.padded(dv), self.scale
        held = [*new]
        if new[0].shape[2] > 0:
            k_new, v_new = (t if t.stride(3) == 1 else t.contiguous() for t in new)
            held += [k_new, v_new]
            call.k_new, call.v_new = k_new.data_ptr(), v_new.data_ptr()
            call.k_new_stride = k_new.stride()[1:3]
            call.v_new_stride = v_new.stride()[1:3]
        call.table, call.starts, call.first, call.held = rows.places
        call.columns, call.window = rows.columns, self.window
        counters = self._share(run, rows, at_once)
        if not at_once:  # a link that stays is told where they are
            held += [k, v, *(by for by in scales if by is not None)]
        return Link(
            self.function, call, counters, [out], [q, *held, *run.held, *rows.held],
            native.counters(call, "bad")[0][0], lambda *pages: _move_pages(call, *pages),
        )  # fmt: skip

    def _share(self, run: Run, rows: "_Rows", at_once: int | None) -> list[tuple[int, int]]:
        """Set how threads share the work, with memory for them. Returns the counters."""
        threads, call = torch.get_num_threads(), run.call
        call.step = _step(call.H // call.Hkv)
        items = self.items(run.q, run.k, rows, bool(at_once))
        whole = self.program.in_order or self.program.changes_weights
        most = 1 if whole else -(-threads // items)
        call.parts = min(most, max(1, rows.longest // LEAST_KEYS))
        call.most = most if at_once and most > 1 else 0
        allocated = call.most or call.parts
        counters = native.counters(call, "slot", "bad", "member")
        if allocated > 1:
            call.partial = run.floats(items * allocated * BLOCK_Q * (call.wide + 2))
            call.arrived = run.zeros(items)
            counters.append((call.arrived, items * 8))
        call.scratch_size = area = (BLOCK_Q + BLOCK_K) * (call.D + call.wide) + 64
        call.scratch = run.floats((at_once or min(threads, items * call.parts)) * area + 8)
        return counters


def _move_pages(
    call: Any, k: Tensor, v: Tensor, k_scales: Tensor | None = None, v_scales: Tensor | None = None
) -> None:
    """Read other pages."""
    call.k, call.v, call.page = k.data_ptr(), v.data_ptr(), k.shape[2]
    call.k_stride, call.v_stride = k.stride()[:3], v.stride()[:3]
    if k_scales is not None and v_scales is not None:
        call.k_scale, call.v_scale = k_scales.data_ptr(), v_scales.data_ptr()
        call.k_scale_stride, call.v_scale_stride = k_scales.stride(), v_scales.stride()


def _step(group: int) -> int:
    """The queries of an item."""
    return max(1, BLOCK_Q // min(group, BLOCK_Q))


_known: dict[tuple[object, ...], _Prepared | None] = {}


def _prepare(call: OverCache) -> _Prepared | None:
    """What serves such a call, looked up by the program's text, because comparing programs would dominate a
    call's cost."""
    program, q, (k, v), dtypes = call.program, call.q, call.pages, tuple(r.dtype for r in call.reads)
    key = (program.text, q.dtype, dtypes, k.dtype, v.dtype, q.shape[3], v.shape[3])
    if key not in _known:
        plan = _plan(program, q, call.pages, call.reads)
        found = None if plan is None else library(plan)
        _known[key] = _Prepared(found, program) if isinstance(found, Library) else None
    return _known[key]


class _Rows:
    """The arguments of the C that describe rows. All layers of a step share them, so the last is kept."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._table: tuple[int, int] | None = None
        self.held = [t if t.is_contiguous() else t.contiguous() for t in rows]
        self.places = [t.data_ptr() for t in self.held]
        self.copies = any(a is not b for a, b in zip(self.held, rows, strict=True))
        self.count, self.columns = rows.table.shape
        self.counts, first, held = counts(rows)
        self.longest = max(held, default=0)
        self.queries, self.keys = (
            max((a + n for a, n in zip(places, self.counts, strict=False)), default=0)
            for places in (first, held)
        )
        self.is_batch = len(set(self.counts)) == 1 and not any(first) and not any(held)
        self.scores = [n * (kept + n // 2) for n, kept in zip(self.counts, held, strict=True)]

    def fit(self, tokens: int, pages: int) -> bool:
        """Whether they divide so many tokens between them, and have pages of these where they keep tokens."""
        table, starts, first, held = self.rows
        if not rows_fit(tokens, starts, first, held) or not table.is_cpu or len(first) != self.count:
            return False
        if self._table is None:
            self._table = table_range(table, self.count)
        if self._table is None:
            return table.ndim == 2 and self.columns == 0  # rows have room for no kept token
        return self.longest == 0 or self._table[1] < pages

    def are_long(self, heads: int) -> list[bool]:
        """For each row with new tokens, and for those without by the others, whether the kernels for whole
        sequences take less time for it."""
        if self.is_batch:
            return [self.counts[0] > BATCHED] * self.count
        long = [heads * n >= LONG for n in self.scores]
        alone = all(is_long for is_long, n in zip(long, self.counts, strict=True) if n)
        return [True] * self.count if alone else long

    def blocks(self, step: int) -> int:
        """The number of blocks of `step` queries in all rows together."""
        return len(self.counts) if max(self.counts) <= step else sum(-(-n // step) for n in self.counts)


_last = threading.local()


def _about(rows: Rows) -> _Rows:
    found: _Rows | None = getattr(_last, "rows", None)
    if found is None or any(a is not b for a, b in zip(found.rows, rows, strict=True)):
        found = _last.rows = _Rows(rows)
    return found


DECODE = Decode()
