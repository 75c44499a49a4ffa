"""`triton.decode`: from a call of attention over a cache to two launched kernels.

Serves calls in which some row has few new tokens; long prompts are computed row by row by `triton.forward`.
In one order of sums it serves all calls, with tiles of one size, and parts of the keys that positions say.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from attngraph.codegen.cpu.operands import OverCache
from attngraph.codegen.scalar.form import SMALL
from attngraph.codegen.scalar.read_ranges import are_in_range
from attngraph.codegen.triton import attempts, store, tuned
from attngraph.codegen.triton import device as gpu
from attngraph.codegen.triton.attempts import KeptPlans, key_of
from attngraph.codegen.triton.blocks import decode_blocks
from attngraph.codegen.triton.emit import JOIN, SPAN, WIDEST_SHARE, emit_decode
from attngraph.codegen.triton.launch import is_served, unsupported
from attngraph.codegen.triton.plan import DTYPES, READS, WIDEST, Blocks, DecodePlan, Read, padded, window_of
from attngraph.codegen.triton.store import is_wide, launch_kernel, loading
from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.cached_attention import Counts, Pair, counts, told
from attngraph.ir.ops.kernels import Reads
from attngraph.ir.ops.quantised import LARGEST

FEW = 16
"""A row's keys are split among programs if it has at most this many new tokens."""
LEAST_KEYS = 256
"""Keys that a part should have at least: with fewer, joining the parts costs more than it saves."""
THREADS, REGISTERS = 2048, 1 << 16
"""Of a multiprocessor."""


class Decode:
    """`triton.decode`.

    Args:
        blocks, splits, programs: tile sizes, parts of the keys, and (if `splits` is None) programs per
            multiprocessor that a launch aims at; None: as measured, else chosen for the call and the GPU.
        family: of kernels with which it is asked for by name.
    """

    def __init__(
        self, blocks: Blocks | None = None, splits: int | None = None, programs: int | None = None,
        family: str = "triton",
    ) -> None:  # fmt: skip
        self.name = f"{family}.decode"
        self._blocks, self._splits, self._programs = blocks, splits, programs
        self._plans: KeptPlans[Prepared | None] = KeptPlans()

    def attend(self, *given: Any, **named: Any) -> Tensor | None:
        call = OverCache(*given, **named)
        program, q, new, pages, reads, sizes, *_ = call
        if q.shape[2] == 0 or gpu.no_device(q) is not None:
            return None
        if _is_part(pages[1], pages[0]) and not _are_equal(*call.scales):
            return None
        about = counts_for(call)
        brought = [n for n in about.new if n]
        if not brought or (min(brought) > FEW and not program.in_order):
            return None
        longest = max(about.held) + max(brought)
        lie_alike = _is_part(pages[1], pages[0]), _is_part(new[1], new[0])
        shapes = key_of(program, (q, *new, *pages), reads, sizes)
        key = shapes, lie_alike, max(brought), longest >= SMALL, call.rows.table.shape[1] > 1

        def prepare() -> Prepared | None:
            return self.prepare(call, about) if self._serves(program, q, pages, reads) else None

        found, extents = self._plans.get(key, prepare), _extents(q, new[0], about)
        if found is None or not are_in_range(program, extents, reads, sizes, torch.float32):
            return None
        splits = found.parts(about, pages[0].shape[1])
        return attempts.run(
            found.plan, q.device, lambda plan: launch_decode(plan, call, splits), lambda: None
        )

    def source(self, program: ScoreProgram, q: Tensor, pages: Pair, reads: Reads) -> str:
        """The module of both kernels. Emitting it needs no GPU; for tensors on a CPU it exists
        only under Triton's interpreter."""
        if gpu.no_device(q) is not None or not self._serves(program, q, pages, reads):
            return ""
        group = q.shape[1] // pages[0].shape[1]
        return emit_decode(self._plan_for(program, q, pages, reads, group, 1)).source

    def _serves(self, program: ScoreProgram, q: Tensor, pages: Pair, reads: Reads) -> bool:
        k, v = pages
        if q.dtype not in DTYPES or k.dtype != v.dtype or k.dtype not in (q.dtype, *LARGEST):
            return False
        if q.dtype is torch.bfloat16 and q.device.type != "cuda":
            return False  # whose products the interpreter computes wrongly
        shared = _is_part(v, k)
        if v.shape[3] > WIDEST or (k.shape[3] - v.shape[3] if shared else k.shape[3]) > WIDEST:
            return False
        if not all(is_served(program, number, reads[number].dtype) for number in program.reads):
            return False
        return unsupported(program) is None and not (program.in_order and k.dtype in LARGEST)

    def _plan_for(
        self, program: ScoreProgram, q: Tensor, pages: Pair, reads: Reads, lanes: int, columns: int
    ) -> DecodePlan:
        """The plan of a call of ordinary size; the lengths are not known."""
        k, v = pages
        lanes = FEW if program.in_order else lanes
        line = tuned_line(program, lanes, k.shape[3], v.shape[3], q.dtype)
        blocks = self._blocks or tuned.find(gpu.name_of(q.device), line, padded(lanes)) or decode_blocks(
            lanes, max(k.shape[3], v.shape[3]), q.dtype, gpu.shared_memory(q.device), k.dtype in LARGEST,
            gpu.capability(q.device),
        )  # fmt: skip
        if program.in_order:  # tiles of pages and of new tokens are loaded side by side
            blocks = dataclasses.replace(blocks, k=min(blocks.k, 64))
        return DecodePlan(
            program, q.dtype, k.shape[3], v.shape[3], q.shape[1] // k.shape[1],
            tuple(Read(n, r, READS[reads[n].dtype]) for n, r in program.reads.items()), blocks,
            shared=_is_part(v, k), window=window_of(program), kept=k.dtype if k.dtype in LARGEST else None,
            page=0 if columns == 1 else k.shape[2], exact=gpu.is_exact(q),
        )  # fmt: skip

    def prepare(self, call: OverCache, about: Counts) -> "Prepared":
        """The plan of a call."""
        program, q, new, (k, v), reads, sizes, rows, *_ = call
        most, longest = max(about.new), max(about.held)
        lanes = q.shape[1] // k.shape[1] * most
        plan = self._plan_for(program, q, (k, v), reads, lanes, rows.table.shape[1])
        plan = dataclasses.replace(
            plan, shared=plan.shared and (new[0].shape[2] == 0 or _is_part(new[1], new[0])),
            reads=tuple(dataclasses.replace(r, wide=is_wide(reads[r.number])) for r in plan.reads),
            wide=max(*q.shape[1:3], longest + most, *map(abs, sizes[: program.sizes])) >= SMALL,
        )  # fmt: skip
        line = tuned_line(program, lanes, k.shape[3], v.shape[3], q.dtype)
        programs = self._programs or tuned.measured(gpu.name_of(q.device)).programs.get(line)
        each = programs or programs_in(plan, gpu.shared_of_multiprocessor(q.device))
        return Prepared(plan, each * gpu.multiprocessors(q.device), programs is not None, self._splits)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A plan, and how many programs a launch of it aims at; `is_measured`: as a table or the caller says.
    `splits`: the number of parts, if the caller says it."""

    plan: DecodePlan
    places: int
    is_measured: bool
    splits: int | None = None

    def parts(self, about: Counts, heads: int) -> int:
        """Into how many parts the keys of each row are split, of so many key heads."""
        plan, longest = self.plan, max(about.held)
        if plan.program.in_order:
            return -(-(longest + max(about.new)) // SPAN)
        if self.splits:
            return self.splits
        visible = min(longest, plan.window) if plan.window else longest
        most = max(1, visible // LEAST_KEYS)
        items = len(about.new) * heads * -(-plan.group * max(about.new) // plan.blocks.q)
        if self.is_measured:
            return max(1, min(self.places // items, most))
        return parts_for(items, self.places, most)


def programs_in(plan: DecodePlan, shared: int) -> int:
    """How many programs should share a multiprocessor with so many bytes of shared memory: about as many as
    fill half of it with tiles of keys and values that are being fetched, since more of these do not come
    faster (measured on an H200: tiles of 32 to 128 keys, widths of 64 to 576); and as its threads and its
    registers (the queries, a tile of scores and the sums) allow."""
    blocks, keys, values = plan.blocks, padded(plan.D), padded(plan.Dv)
    row = values + padded(plan.rest) * bool(plan.rest) if plan.shared else keys + values
    tiles = max(1, blocks.stages - 1) * blocks.k * row * plan.dtype.itemsize
    numbers = blocks.q * (values + blocks.k + keys // 2) + 32 * 32 * blocks.warps
    return max(1, min(THREADS // (32 * blocks.warps), round(shared / 2 / tiles), REGISTERS // numbers))


@functools.lru_cache(maxsize=1024)
def parts_for(items: int, places: int, most: int) -> int:
    """Into how many parts, at most `most`, the keys of `items` programs are split where `places` programs run
    at once: as few as leave about as few places idle in the last round as any other number would
    (FlashAttention's rule, `num_splits_heuristic`)."""
    if items >= 0.8 * places:
        return 1
    rounds = [items * n / places for n in range(1, min(most, places) + 1)]
    busy = [n / math.ceil(n) for n in rounds]
    return next(n for n, found in enumerate(busy, 1) if found >= 0.85 * max(busy))


def counts_for(call: OverCache) -> Counts:
    """The rows of a call as numbers: how many keys a row has is at most what its pages hold, which is enough
    to know where keys are fixed. Of a call that a CUDA graph captures it is what holds in every replay: each
    row brings as many tokens as now."""
    q, rows, are_fixed = call.q, call.rows, call.new[0].shape[2] == 0
    starts, first, room = told(rows.starts), told(rows.first), rows.table.shape[1] * call.pages[0].shape[2]
    full = [room] * rows.table.shape[0]
    if gpu.is_captured(q.device):
        new = [q.shape[2]] * len(full) if starts is None else _differences(starts)
        return Counts(new, full, full)
    if are_fixed and starts is not None and first is not None:
        return Counts(_differences(starts), first, told(rows.held) or full)
    return counts(rows)


def _differences(starts: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(starts)]


def _extents(q: Tensor, new: Tensor, about: Counts) -> tuple[int, int, int, int]:
    """How far the indices of a call go: its rows, its heads, and the positions of queries and of keys."""
    queries = max(first + count for first, count in zip(about.first, about.new, strict=True))
    fresh = about.new if new.shape[2] else [0] * len(about.new)
    keys = max(held + count for held, count in zip(about.held, fresh, strict=True))
    return len(about.new), q.shape[1], queries, max(keys, 1)


def tuned_line(program: ScoreProgram, lanes: int, D: int, Dv: int, dtype: torch.dtype) -> str:
    """The key of a table's entry: "decode of 16 queries, bfloat16, 128 wide, values 128, causal"."""
    return tuned.key(f"decode of {padded(lanes)} queries", program, D, Dv, dtype)


def launch_decode(plan: DecodePlan, call: OverCache, splits: int) -> Tensor:
    """The output, by the plan's two kernels, with each row's keys split into `splits` parts. The log-sum-exps
    are written to `lse`, float32 `[1, heads, N]`."""
    _, q, (k_new, v_new), (k, v), reads, sizes, rows, scales, lse = call
    _, heads, tokens, _ = q.shape
    most = max(counts_for(call).new)
    shares = -(-plan.group * most // plan.blocks.q)
    items = rows.table.shape[0] * k.shape[1]
    parts, dv = items * splits * shares * plan.blocks.q, v.shape[3]
    acc = torch.empty((parts, dv), dtype=torch.float32, device=q.device)
    m, l = torch.empty((2, parts), dtype=torch.float32, device=q.device)
    out = torch.empty((1, tokens, heads, dv), dtype=q.dtype, device=q.device)
    if plan.kept is torch.float8_e4m3fn:  # which not every GPU converts: its bits are read
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    given = [q, k, k_new] if plan.shared else [q, k, v, k_new, v_new]
    given += [by for by in scales[: 1 if plan.shared else 2] if by is not None]
    arguments: list[Any] = [*given, acc, m, l, rows.table, rows.starts, rows.first, rows.held]
    arguments += [heads, k.shape[1], rows.table.shape[1], k.shape[2], splits, int(k_new.shape[2] > 0)]
    arguments += q.stride()[1:]
    for tensor in given[1:]:
        arguments += tensor.stride()[1:] if tensor is k_new or tensor is v_new else tensor.stride()
    arguments += [*store.read_arguments(plan, reads), *sizes[: plan.program.sizes]]
    first, second = load(plan)
    lanes = plan.group * most
    sums = None if lse is None else lse if lse.is_contiguous() else torch.empty_like(lse).contiguous()
    launch_kernel(first, (items * splits, shares), arguments, store.launch_options(plan), q.device)
    joined = [acc, m, l, rows.starts, out, sums, heads, k.shape[1], splits, shares, lanes, tokens]
    launch_kernel(second, (items * lanes, -(-dv // WIDEST_SHARE)), joined, {}, q.device)
    if lse is not None and sums is not None and sums is not lse:
        lse.copy_(sums)
    return out.transpose(1, 2)


def _is_part(v: Tensor, k: Tensor) -> bool:
    """Whether values are the first Dv elements of the keys, in the same memory."""
    if v.shape[3] > k.shape[3] or v.stride() != k.stride():
        return False
    if isinstance(v, FakeTensor):
        own = v.untyped_storage()._cdata == k.untyped_storage()._cdata
        return own and bool(v.storage_offset() == k.storage_offset())
    return v.data_ptr() == k.data_ptr()


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether both are the same memory, or none."""
    if first is None or second is None:
        return first is second
    return first.data_ptr() == second.data_ptr() and first.stride() == second.stride()


load = loading(emit_decode, lambda module, name: (getattr(module, name), getattr(module, JOIN)))
"""A plan's two kernels."""
