"""Attention over a cache: the ops of a decoder's graph.

A step computes new tokens of several sequences (rows) at once. They are packed, `[1, heads, N, width]`:
tokens starts[r] .. starts[r + 1] - 1 belong to row r, and the first of them has position first[r] in its
sequence. Their queries attend to the keys in the row's pages (positions 0 .. held[r] - 1) and to the new keys
(from position held[r] on; where keys are fixed, k and v hold no tokens). `program` is the score program of
the whole-sequence attention, unchanged: b is the row, q and k are positions, and tensors that it reads at q
or k are indexed by position.

Pages are `[pages, heads, page, width]`; position p of row r lies in page table[r, s // page] at s % page,
where s = p % (columns * page): if a row has more tokens than its pages can hold, the latest are kept. Pages
of 8 bits have scales, `[pages, heads, page]` (`quantised.py`); pages of any other dtype have none. Whatever
their dtype, keys and values are computed with in that of the new tokens'.
"""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attngraph.ir.language import E, ScoreProgram, Statement, operation, parse
from attngraph.ir.ops import kernels
from attngraph.ir.ops.attention import check_operands
from attngraph.ir.ops.declare import INSTEAD, Sizes, declare, require_no_derivative, require_no_order
from attngraph.ir.ops.kernels import Part, cleared, joined, tell_shares
from attngraph.ir.ops.quantised import widened
from attngraph.ir.versions import version_of

Pair = tuple[Tensor, Tensor]
"""Keys and values, of new tokens or in pages."""
Scales = tuple[Tensor | None, Tensor | None]
"""Of the pages of keys and of values; None where these are wide enough to have none."""
UNSCALED: Scales = (None, None)


class Rows(NamedTuple):
    """Which tokens belong to which row: see the top of this file. All int64."""

    table: Tensor
    starts: Tensor
    first: Tensor
    held: Tensor


class Counts(NamedTuple):
    """`Rows` as Python numbers: for each row its new tokens, the first one's position, its kept tokens."""

    new: list[int]
    first: list[int]
    held: list[int]


_last = threading.local()
_TOLD = "_attngraph_numbers"


def tell(tensor: Tensor, numbers: Sequence[int]) -> Tensor:
    """Say what a tensor of whole numbers holds, wherever it lies: nobody then has to ask its device."""
    vars(tensor)[_TOLD] = version_of(tensor), list(numbers)
    return tensor


def told(tensor: Tensor) -> list[int] | None:
    """What has been said of a tensor; None where nothing has, or where it has been written to since."""
    version, numbers = vars(tensor).get(_TOLD, (None, None))
    return numbers if version == version_of(tensor) else None


def numbers_of(tensor: Tensor) -> list[int]:
    """What a tensor of whole numbers holds: as was told, or else as its device answers."""
    known = told(tensor)
    return tensor.tolist() if known is None else known


def counts(rows: Rows) -> Counts:
    """`Rows` as Python numbers. All layers of a step share these tensors, so a copy from a device is made
    once per step, and only where nobody has told the numbers."""
    own = rows[1:]
    versions = [version_of(t) for t in own]
    known: tuple[Any, list[int | None], Counts] | None = getattr(_last, "known", None)
    is_known = known is not None and None not in versions and known[1] == versions
    if known is None or not is_known or any(a is not b for a, b in zip(known[0], own, strict=True)):
        starts, first, held = map(numbers_of, own)
        found = Counts([b - a for a, b in itertools.pairwise(starts)], first, held)
        known = _last.known = own, versions, found
    return known[2]


def only(wanted: Sequence[bool], rows: Rows) -> tuple[Tensor, Rows]:
    """The places of these rows' tokens, and the same rows where the others have no tokens."""
    new, device = counts(rows).new, rows.starts.device
    tokens = torch.repeat_interleave(torch.tensor(wanted), torch.tensor(new)).nonzero().squeeze(1)
    starts = [0, *itertools.accumulate(n if want else 0 for n, want in zip(new, wanted, strict=True))]
    return tokens.to(device), rows._replace(starts=tell(torch.tensor(starts).to(device), starts))


@dataclasses.dataclass(frozen=True)
class Store:
    """A value of the graph that is cached for every token.

    `shape` is the shape of its pages, with 0 for the number of pages (dimension `row_dim`) and for the tokens
    in a page (dimension `token_dim`). `window`: how many of the latest tokens are needed (None: all). `label`
    describes the value in the report; `uses` is the number of operands that are views of it. `scales_of`: the
    name of the store whose numbers of 8 bits these are the scales of. `team`: how many ranks divide its
    tokens, and `member`: which of them this is (`divided_attention.py`). `size`: for how many tokens an entry
    is kept, in the place of the last of them (`meaning/tokens/streams.py`).
    """

    name: str
    shape: tuple[int, ...]
    row_dim: int
    token_dim: int
    dtype: torch.dtype
    window: int | None
    label: str
    uses: int = 1
    scales_of: str = ""
    team: int = 1
    member: int = 0
    size: int = 1

    @property
    def table(self) -> str:
        """The name of the input that is its page table."""
        about = f"table.{self.window or 'all'}" + f".{self.team}" * (self.team > 1)
        return about + f".each{self.size}" * (self.size > 1)

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_in(None)

    def bytes_in(self, dtype: torch.dtype | None) -> int:
        """Bytes per token where floating values are cached in another dtype (None: as computed): on one rank,
        in the mean over tokens (also where an entry is for several), rounded up."""
        return -(-self.entry_bytes(dtype) // self.size)

    def entry_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes of an entry, which several tokens may have together; `dtype` and ranks as in `bytes_in`."""
        dims = [n for place, n in enumerate(self.shape) if place not in (self.row_dim, self.token_dim)]
        kept = dtype if dtype is not None and self.dtype.is_floating_point else self.dtype
        return -(-math.prod(dims) * kept.itemsize // self.team)


def in_ring(window: int, rollback: int) -> int:
    """How many of a row's latest tokens are kept where only those of a window are needed, and so many may be
    taken back."""
    return max(window - 1, 1) + rollback


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A value computed once for each prompt. `row_dim` is its batch dimension (None: shared by all
    sequences); each sequence has `own` entries there, which are adjacent if `together` (`[B * H]`), else
    strided (`[H * B]`)."""

    name: str
    row_dim: int | None
    own: int = 1
    together: bool = True


@dataclasses.dataclass(frozen=True)
class Carried:
    """A value of which each row has one, whatever its length: a sum over earlier tokens, say. It is zero
    before the first token. `shape` is that of one row's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: str

    @property
    def bytes_per_row(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """What a decoder's graph keeps: `stores` of every token, `carried` of every row. `expanded`: bytes per
    token that keys and values of every query head would take; `attentions`: how many use the stores;
    `length`: the symbol for a sequence's length in the graph's conditions, or the only length that was
    traced; `step_tokens`: the symbol for the number of new tokens of a step; `most_tokens`: the longest
    sequence that the model's position tables cover; `rounding`: of tables that say how carried values decay,
    relative to their entries, 0 without such tables; `anew`: the lines of values that every step computes
    anew from all tokens; `assumed`: operations that are taken not to look at later tokens, and why that could
    not be shown; `least`: what is computed from all tokens is computed of at least so many, 0 if nothing is;
    `others`: from how many tokens on it was compared with the model that it is right for lengths that the
    conditions leave out, 0 if it was not; `begins`: how many learned places each row begins with, which the
    sizes of the graph count (those of `most_tokens` and `others`, too), and a state's lengths do not;
    `beside`: how many of the last numbers of each result are no logits, but what a draft is given."""

    stores: tuple[Store, ...] = ()
    fixed: tuple[Fixed, ...] = ()
    expanded: int = 0
    attentions: int = 0
    length: str = ""
    step_tokens: str = ""
    most_tokens: int | None = None
    carried: tuple[Carried, ...] = ()
    rounding: float = 0.0
    anew: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    least: int = 0
    others: int = 0
    begins: int = 0
    beside: int = 0

    @property
    def bytes_per_row(self) -> int:
        """What a row carries whatever its length."""
        return sum(value.bytes_per_row for value in self.carried)

    @property
    def bytes_per_token(self) -> int:
        return sum(store.bytes_per_token for store in self.stores)


class CachedKernel(Protocol):
    """A kernel for attention over a cache; it returns None for arguments that it does not support."""

    name: str

    def attend(
        self, program: ScoreProgram, q: Tensor, new: Pair, pages: Pair, reads: Sequence[Tensor],
        sizes: Sequence[int], rows: Rows, scales: Scales = UNSCALED, lse: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """The result. `lse`, `[1, heads, N]` in the dtype of sums, is where the log-sum-exps are written."""

    def source(self, program: ScoreProgram, q: Tensor, pages: Pair, reads: Sequence[Tensor]) -> str:
        """The source compiled for calls with one new token per row (fake tensors are fine); "" if this kernel
        does not support them. Pages of 8 bits are taken to have scales."""


CACHED: list[CachedKernel] = []
"""Kernels in order of preference; calls that none supports are computed row by row by those of `KERNELS`."""


def kernels_named(by: str) -> list[CachedKernel]:
    """Those of this name or family; all of them if it is empty."""
    return [c for c in CACHED if by in ("", c.name, c.name.partition(".")[0])]


def source_for_short_queries(
    program: ScoreProgram, q: Tensor, pages: Pair, reads: Sequence[Tensor], by: str = ""
) -> tuple[str, str]:
    """The kernel for calls with one new token per row, and the source compiled for them; both empty if no
    kernel that is generated from source supports them."""
    texts = ((c.name, c.source(program, q, pages, reads)) for c in kernels_named(by))
    return next((found for found in texts if found[1]), ("", ""))


def packed_result(a: Any) -> Tensor:
    """What attention over a cache gives, without data."""
    like, width = (a.v, a.v.shape[3]) if hasattr(a, "v") else (a.q, a.values[1])
    if getattr(a, "value_up", None) is not None:
        width = a.value_up.shape[1]
    rows, heads, tokens = a.q.shape[:3]  # rows: 1 at run time; a symbol in a graph traced with several
    found: Tensor = like.new_empty((rows, tokens, heads, width)).transpose(1, 2)
    return found


@declare(fake=packed_result, derivatives=INSTEAD, plain=True)
def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, reads: list[Tensor], sizes: Sizes,
    program: str, table: Tensor, starts: Tensor, first: Tensor, held: Tensor, by: str = "",
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What the op computes. `by` names the kernel or its family ("cpu", "reference", ...; empty: any). No
    gradients."""
    require_no_derivative("cached_attention", INSTEAD, (q, k, v, reads))  # decoders call this directly
    rows, scales = Rows(table, starts, first, held), (k_scales, v_scales)
    return attended(parse(program), q, (k, v), (k_pages, v_pages), reads, sizes, rows, by, scales)


def no_pages(like: Pair) -> Pair:
    """Pages for rows that have kept nothing."""
    k, v = (t.new_empty((1, t.shape[1], 1, t.shape[3])) for t in like)
    return k, v


def attended(
    program: ScoreProgram, q: Tensor, new: Pair, pages: Pair, reads: Sequence[Tensor], sizes: Sequence[int],
    rows: Rows, by: str, scales: Scales = UNSCALED, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same, by the first kernel that supports the call; the log-sum-exps are written to `lse`."""
    for candidate in kernels_named(by):
        out = candidate.attend(program, q, new, pages, reads, sizes, rows, scales, lse)
        if out is not None:
            return out
    require_no_order(program.in_order and q.numel() > 0, q, "attention over a cache")
    return row_by_row(program, q, new, pages, reads, sizes, rows, by.partition(".")[0], scales, lse)


def row_by_row(
    program: ScoreProgram, q: Tensor, new: Sequence[Tensor], pages: Sequence[Tensor], reads: Sequence[Tensor],
    sizes: Sequence[int], rows: Rows, family: str = "", scales: Sequence[Tensor | None] = UNSCALED,
    lse: Tensor | None = None, keys_of: Callable[..., Pair] = lambda k, v: (k, v), block: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute each row separately: its kept and new keys are concatenated, and its positions count from the
    first of them. If no row has kept tokens and all are equally long, they are computed together. The
    log-sum-exps are written to `lse`, `[1, heads, N]`. `keys_of`: keys and values of what is kept of tokens;
    they are made of `block` tokens at a time, if that is given, and the blocks' results are merged."""
    lengths, first, held = counts(rows)
    starts = [0, *itertools.accumulate(lengths)]
    fixed = new[0].shape[2] == 0 and q.shape[2] > 0
    if not block and not fixed and not any(held) and not any(first) and len(set(lengths)) == 1 and lengths[0]:
        batch = [t[0].reshape(t.shape[1], len(lengths), lengths[0], -1).transpose(0, 1) for t in (q, *new)]
        out, sums = attend_to(program, batch, reads, sizes, family)
        if lse is not None:
            lse.copy_(cleared(out, sums, (*batch, *reads)).lse.transpose(0, 1).flatten(1)[None])
        return out.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)
    shifted, count = shift(program)

    def attend(row: int, start: int, until: int) -> Part:
        """Of one row, to the keys from position `start` on."""
        place, old = slice(starts[row], starts[row + 1]), held[row]
        query, slots = q[:, :, place], torch.arange(start, max(start, min(until, old)), device=q.device)
        fresh = [n[:, :, place][:, :, max(0, start - old) : max(0, until - old)] for n in new]
        keys = keys_of(*(
            torch.cat([gather(p, rows.table[row], slots, by, n.dtype), n], 2)
            for p, n, by in zip(pages, fresh, scales, strict=True)
        ))  # fmt: skip
        moved = [*sizes, *([0] * (count - len(sizes))), row, first[row], start]
        out, sums = attend_to(shifted, (query, *keys), reads, moved, family)
        return cleared(out, sums, (query, *keys, *reads)) if block or lse is not None else Part(out, sums)

    outs: list[Tensor] = []
    for row in (row for row, length in enumerate(lengths) if length):
        oldest = max(0, held[row] - rows.table.shape[1] * pages[0].shape[2])
        total = held[row] + (0 if fixed else lengths[row])
        # A sink would be counted once per block, and `p = ...` applies to weights over all keys.
        joins = program.sink is None and not program.changes_weights
        step = block if block and joins else max(1, total)
        parts = [attend(row, start, min(start + step, total)) for start in range(oldest, total, step)]
        if len(parts) > 1 and all(part.is_clear for part in parts) and tell_shares(parts):
            part = joined(parts)
        else:
            part = parts[0] if len(parts) == 1 else attend(row, oldest, total)
        if lse is not None:
            lse[:, :, starts[row] : starts[row + 1]] = part.lse
        outs.append(part.out.transpose(1, 2))
    if not outs:
        values = keys_of(*(n[:, :, :0] for n in new))[1]
        outs = [q.new_empty((1, 0, q.shape[1], values.shape[3]))]
    return torch.cat(outs, 1).transpose(1, 2)


def attend_to(
    program: ScoreProgram, operands: Sequence[Tensor], reads: Sequence[Tensor], sizes: Sequence[int],
    family: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by a kernel of this family, with the log-sum-exps."""
    q, k, v = operands
    if q.shape[2] == 0:
        return v.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3])
    check_operands(q, k, v, reads, sizes, program)
    return kernels.choose(program, (q, k, v), family).forward(program, (q, k, v), reads, sizes)


def gather(
    pages: Tensor, table: Tensor, positions: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The contents of one row's pages at these positions, in a floating dtype: `[1, heads, positions,
    width]`."""
    page = pages.shape[2]
    slots = positions % max(1, table.shape[0] * page)  # where there are no pages, there are no positions
    places = table[slots // page], slots % page
    picked = pages[places[0], :, places[1]]
    picked = picked.to(dtype) if scales is None else widened(picked, scales[places[0], :, places[1]], dtype)
    return picked.transpose(0, 1).unsqueeze(0)


@functools.lru_cache(maxsize=256)
def shift(program: ScoreProgram) -> tuple[ScoreProgram, int]:
    """The program for a single row whose queries and keys are indexed from 0, and its number of sizes so far:
    three more follow them, the row, the first query's position and the first key's."""
    count = program.sizes
    row, first, oldest = (E.size(f"n{count + n}") for n in range(3))
    b, q, k = map(E.var, "bqk")
    moved = {b: operation("add", b, row), q: operation("add", q, first), k: operation("add", k, oldest)}
    return replaced(program.statements, moved), count


def replaced(statements: Sequence[Statement], moved: Mapping[E.Expr, E.Expr]) -> ScoreProgram:
    """The program of these statements with other expressions in place of variables."""
    made = ScoreProgram(tuple(statements)).mapped(lambda formula: E.replaced(formula, moved))
    return parse(str(made))
