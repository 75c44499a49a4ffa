"""Records of what a compilation found and did: an attention, a pass, a cache.

Plain records, filled in by passes and by the composition root, read by `report.py`, `dump.py` and the page.
They hold text and numbers, never a tensor or a node.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from attngraph.report.ranks import CacheRanksEntry, ContextEntry, RanksEntry
from attngraph.report.user_code import UserCode


@dataclasses.dataclass(frozen=True)
class LatentEntry:
    """How an attention whose keys and values are made from a latent is computed.

    A token's latent has `width` values, its keys and values `expanded`. `absorb` is "auto", "always" or
    "fold", or empty where the attention is left as the model has it, for `reason`. With "auto" a call absorbs
    if each row has fewer than `crossover` new tokens (None: always), for many cached tokens; by operations
    alone it would be fewer than `crossover_by_flops`. `pair_absorbed` and `pair_expanded` are floating-point
    operations of one query and one key, `up` those of projecting one key and one value. If folded:
    `parameters` before and after, `operations` of one token with them before and after, and in `apart` why
    some matrices stay separate, if they do.
    """

    width: int = 0
    expanded: int = 0
    absorb: str = ""
    crossover: int | None = None
    crossover_by_flops: float = 0.0
    pair_absorbed: int = 0
    pair_expanded: int = 0
    up: int = 0
    reason: str = ""
    parameters: tuple[int, int] | None = None
    operations: tuple[int, int] | None = None
    apart: str = ""

    def lines(self) -> list[str]:
        """Lines of text: what is kept, how it is computed, what it costs."""
        if self.reason:
            return [f"left expanded: {self.reason}"]
        kept = f"{self.width:,} values per token for {self.expanded:,}"
        if not self.absorb:
            return [f"{kept}, values are a part of the keys"]
        cost = (
            f"operations: {self.pair_absorbed:,} absorbed, {self.pair_expanded:,} expanded for a pair, "
            f"{self.up:,} to expand a token"
        )
        return [f"{kept}, {self._order()}", cost]

    def _order(self) -> str:
        if self.parameters is not None and self.operations is not None:
            (p, q), (a, b) = self.parameters, self.operations
            apart = f" (apart: {self.apart})" if self.apart else ""
            return f"folded: {p:,} -> {q:,} parameters, {a:,} -> {b:,} operations a token{apart}"
        if self.absorb != "auto":
            return f"{self.absorb} absorbed"
        if self.crossover is None:
            return "always absorbed, by cost"
        return (
            f"expanded from {self.crossover:,} new tokens of a row on, over many kept ones "
            f"(by operations alone {self.crossover_by_flops:,.0f})"
        )

    def describe(self) -> str:
        return "; ".join(self.lines())


@dataclasses.dataclass(frozen=True)
class KernelEntry:
    """Which backend computes an attention, and the source that was emitted for it ("" for a kernel of a
    library, or one that is chosen at each call). `remarks` are what came up in running it: that it did not
    compile, say, and what was done instead, or how long compiling it took."""

    name: str = ""
    source: str = dataclasses.field(default="", repr=False)
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name or "-"


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """The sizes of the call that was traced: `numbers` are those that the program names n0, n1, ...,
    `read_bytes` the bytes of the tensors that it reads."""

    batch: int
    queries: int
    keys: int
    dtype: str
    numbers: tuple[int, ...] = ()
    read_bytes: int = 0

    @property
    def itemsize(self) -> int:
        found: torch.dtype = getattr(torch, self.dtype)
        return found.itemsize


@dataclasses.dataclass(frozen=True)
class AttentionEntry:
    """One attention of the model.

    `name` is the module that computes it, `program` its score program, `mask` the mask in words,
    `source` the user's line. `heads`, `kv_heads`, `head_dim`, `value_dim` are those of the traced call,
    `call` its other sizes. `kernel` is what computes it, `numerics` how the result relates to the
    eager one, `error` the largest relative error found when it was checked in float64. `merged` is how many
    attentions of the model (one per head, say) it stands for. `latent` is set where keys and values are
    computed from a narrower value, or nearly so. `warning` is what looks like a mistake of the model.
    `axes` are factors of `heads` that are other axes of what the model was given, the rows of a map for
    example: those of queries and keys, then those of queries alone.
    Where `source` is in a library's function, `caller` is the model's line that calls it, and `code` is
    the text of that line.
    """

    name: str
    program: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    mask: str
    source: str
    kernel: KernelEntry
    error: float
    numerics: str = "reassociated"
    merged: int = 1
    latent: LatentEntry | None = None
    call: TracedCall | None = None
    warning: str = ""
    caller: str = ""
    code: str = ""
    axes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def heads_in_words(self) -> str:
        """`8 heads on 2 key/value heads of width 64`, `1 head of width 32 at each of 16 places of another
        axis`."""
        both, queries = self.axes
        heads = self.heads // math.prod((*both, *queries))
        kv_heads = self.kv_heads // math.prod(both)
        words = _heads(heads) + (
            f" on {kv_heads:,} key/value head{'s' * (kv_heads > 1)}" * (heads != kv_heads)
        )
        words += f", merged from {self.merged} attentions," if self.merged > 1 else ""
        words += f" of width {self.head_dim}"
        words += f" (values {self.value_dim})" if self.value_dim != self.head_dim else ""
        words += f", at each of {_places(both)} of another axis" if both else ""
        return words + (f", for queries at {_places(queries)} of another axis" if queries else "")

    @property
    def kind(self) -> tuple[object, ...]:
        """A key by which attentions are equal for a reader: everything but where they are in the model."""
        skipped = ("name", "error")
        return tuple(v for k, v in vars(self).items() if k not in skipped)

    @property
    def flops(self) -> int | None:
        """Operations of both products over all pairs of a query and a key, masked or not."""
        return None if self.call is None else 2 * self._scores() * (self.head_dim + self.value_dim)

    @property
    def bytes(self) -> int | None:
        """Bytes that fusing cannot avoid: every operand read once, the result written once."""
        if self.call is None:
            return None
        tokens = self.heads * self.call.queries + self.kv_heads * self.call.keys
        values = self.call.batch * tokens * (self.head_dim + self.value_dim)
        return values * self.call.itemsize + self.call.read_bytes

    @property
    def score_bytes(self) -> int | None:
        """Bytes of one matrix of scores, of which the unfused graph writes and reads several."""
        return None if self.call is None else self._scores() * self.call.itemsize

    @property
    def cached_bytes(self) -> int | None:
        """Bytes that a cache has to keep of one token: keys and values, or the latent they are made from."""
        if self.call is None:
            return None
        width = self.kv_heads * (self.head_dim + self.value_dim)
        return (self.latent.width if self.latent and self.latent.width else width) * self.call.itemsize

    def _scores(self) -> int:
        call = self.call
        return 0 if call is None else call.batch * self.heads * call.queries * call.keys


def _heads(count: int) -> str:
    return f"{count:,} head{'s' * (count != 1)}"


def _places(axes: tuple[int, ...]) -> str:
    return f"{' x '.join(map(str, axes))} places"


@dataclasses.dataclass(frozen=True)
class Missed:
    """A softmax that was not fused: why, and where.

    `is_routing`: it is known to be no attention, because it chooses among a model's outputs (a router of
    experts, a sampler).
    """

    reason: str
    source: str
    name: str = ""
    is_routing: bool = False


@dataclasses.dataclass(frozen=True)
class Break:
    """Where capture of the whole model stopped, so that torch.compile captures it in pieces."""

    reason: str
    source: str


EXAMPLE_BATCH, EXAMPLE_LENGTH = 32, 4096
"""The sizes of the example in a report's text."""


def binary(count: float) -> str:
    """A number of bytes in the largest binary unit of which there is at least one."""
    units = ["TiB", "GiB", "MiB", "KiB"]
    if count < 1024:
        return f"{count:,.0f} bytes"
    while (count := count / 1024) >= 1024 and len(units) > 1:
        units.pop()
    return f"{count:,.1f} {units[-1]}"


@dataclasses.dataclass(frozen=True)
class Drift:
    """How far a decoder's logits are from those that its model gives without rounding, over `tokens` tokens:
    the divergence (Kullback and Leibler) of the distribution of the next token, in nats, in the mean and at
    most, and for how many tokens the likeliest one is the same."""

    tokens: int
    mean: float
    largest: float
    same: int

    def __str__(self) -> str:
        return (
            f"over {self.tokens:,} tokens the logits' KL divergence is {self.mean:.1e} in the mean, "
            f"{self.largest:.1e} at most; the likeliest token is the same for {self.same:,}"
        )


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """What a derived decoder keeps.

    `bytes_per_token` is for all layers together; `expanded` what keys and values of every query head would
    take; `stores` lists (what, bytes per token, window or None). `fixed` values are computed once for a
    prompt. `most_tokens` is the longest sequence the model takes (None: no limit is known). `error` is the
    largest difference to the whole sequence, in float64, relative to the largest logit (None: not compared).
    Where a window is kept, so are `rollback` more tokens; a row's room is a multiple of `page` tokens.
    `unset` are attributes that the model's forward sets and the decoder does not; `unchecked` are lines that
    raise for certain values in the model, but not in the decoder.
    `carried` lists (what, bytes) of values of which each sequence has one, whatever its length; `anew` the
    lines of values that every step computes anew from all tokens. Where several ranks keep it, all of this is
    what one of them keeps, and `ranks` says how it is divided.
    `rounded` is the dtype of 8 bits in which keys and values are kept with scales ("": none are), `drift`
    what that changes (None: not measured), `unrounded` what is kept as it is computed although it was asked
    to be rounded.
    """

    bytes_per_token: int
    expanded: int
    attentions: int
    stores: tuple[tuple[str, int, int | None], ...]
    fixed: int = 0
    most_tokens: int | None = None
    error: float | None = None
    rollback: int = 0
    page: int = 1
    unset: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    carried: tuple[tuple[str, int], ...] = ()
    anew: tuple[str, ...] = ()
    rounded: str = ""
    drift: Drift | None = None
    unrounded: tuple[str, ...] = ()
    ranks: CacheRanksEntry | None = None

    @property
    def bytes_per_row(self) -> int:
        """What a sequence needs whatever its length: carried values, and what windows keep."""
        return sum(size for _, size in self.carried) + sum(
            size * (max(window - 1, 1) + self.rollback)
            for _, size, window in self.stores
            if window is not None
        )

    def bytes(self, batch: int, length: int) -> int:
        """Bytes that a cache needs for `batch` sequences of `length` tokens each.

        Values that are computed once for a prompt (an encoder's) are not included. A contiguous cache without
        `max_length` grows by doubling, so it may hold up to twice this.

        Raises:
            ValueError: a negative number, or more tokens than a sequence can have.
        """
        if batch < 0 or length < 0:
            raise ValueError(f"batch and length must not be negative, found {batch} and {length}.")
        if self.most_tokens is not None and length > self.most_tokens:
            raise ValueError(f"a sequence has at most {self.most_tokens:,} tokens, found {length:,}.")

        def room(window: int | None) -> int:
            tokens = length if window is None else max(window - 1, 1) + self.rollback
            return -(-tokens // self.page) * self.page if length else 0

        kept = sum(size * room(window) for _, size, window in self.stores)
        return batch * (kept + sum(size for _, size in self.carried))

    def _where(self) -> str:
        return "" if self.ranks is None else f" on each of {self.ranks.count} ranks"

    def lines(self) -> list[str]:
        layers = f", {self.bytes_per_token / self.attentions:,.0f} per attention" if self.attentions else ""
        found = [
            "",
            f"  cache   {self.bytes_per_token:,} bytes per token{self._where()}{layers}"
            + (
                f", {self.bytes_per_row:,} bytes per sequence whatever its length"
                if self.bytes_per_row
                else ""
            ),
            f"      keys and values of every query head would be {self.expanded:,}",
        ]
        for (size, window), group in itertools.groupby(self.stores, key=lambda s: s[1:]):
            members = [s[0] for s in group]
            kept = "all tokens" if window is None else f"the last {window}"
            names = members[0] if len(members) == 1 else f"{members[0]} .. {members[-1]}"
            found.append(f"      {len(members)} value(s) of {size:,} bytes per token, {kept}   {names}")
        if self.carried:
            size = sum(size for _, size in self.carried)
            found.append(
                f"      {len(self.carried)} value(s) of {size:,} bytes in all, one for each sequence"
            )
        length = min(self.most_tokens or EXAMPLE_LENGTH, EXAMPLE_LENGTH)
        one, many = (binary(self.bytes(batch, length)) for batch in (1, EXAMPLE_BATCH))
        found.append(f"      {length:,} tokens: {one} for one sequence, {many} for {EXAMPLE_BATCH}")
        if self.fixed:
            found.append(f"      {self.fixed} value(s) computed once for a prompt")
        if self.anew:
            lines = ", ".join(dict.fromkeys(self.anew))
            found.append(
                f"      {len(self.anew)} value(s) computed anew from all tokens at every step: {lines}"
            )
        if self.most_tokens is not None:
            found.append(f"      at most {self.most_tokens:,} tokens in a sequence")
        found += () if self.ranks is None else self.ranks.lines()
        if self.unset:
            found.append(f"      not set, unlike by the model's own forward(): {', '.join(self.unset)}")
        if self.unchecked:
            found.append(
                f"      not checked, unlike by the model's own forward(): {', '.join(self.unchecked)}"
            )
        if self.rounded:
            found.append(
                f"      approximate: kept as {self.rounded} with a scale for each token and head; "
                f"{self.drift or 'what that changes was not measured'}"
            )
        if self.unrounded:
            found.append(
                f"      {len(self.unrounded)} value(s) kept as computed, not in 8 bits "
                f"(the pass quantise-cache says why): {', '.join(dict.fromkeys(self.unrounded))}"
            )
        shown = "not compared with whole sequences" if self.error is None else (
            f"equal to whole sequences in float64 (error {self.error:.0e})"
            + ", before rounding" * bool(self.rounded))  # fmt: skip
        return [*found, f"      {shown}"]


@dataclasses.dataclass(frozen=True)
class TokenProgramEntry:
    """A token program: what it computes for each token, the modules that have it, and its kernel."""

    program: str
    names: tuple[str, ...]
    kernel: KernelEntry


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """One run of one pass. `before` and `after` count computing ops; `options` are the pass's own, as text;
    `text` is the whole graph after it, if it changed something."""

    name: str
    changed: bool
    seconds: float
    before: int
    after: int
    notes: tuple[str, ...]
    options: str = ""
    text: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True)
class Entries:
    """All records of a compilation.

    `numbers` says why torch could not vary sizes, so that calls with other sizes are compiled again.
    `retraces`: why calls were traced again, and how often. `capture`: the seconds of `seconds` that tracing
    took. `small_calls`: how many calls ran the model itself because fusing gains nothing at their sizes.
    `captured` is the graph as it was traced, as text, `code` the user's lines that it comes from, `programs`
    its token programs, equal ones once. Where there are several graphs, `parts` has the entries of each,
    including the graphs' texts. `taken_from`: the folder of files, if it was not compiled now; then times are
    those of when it was.
    """

    attention: tuple[AttentionEntry, ...] = ()
    missed: tuple[Missed, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    breaks: tuple[Break, ...] = ()
    seconds: float = 0.0
    graphs: int = 1
    cache: CacheEntry | None = None
    ranks: RanksEntry | None = None
    context: ContextEntry | None = None
    numbers: tuple[Break, ...] = ()
    captured: str = dataclasses.field(default="", repr=False)
    code: UserCode = dataclasses.field(default=UserCode(), repr=False)
    retraces: tuple[tuple[str, int], ...] = ()
    capture: float = 0.0
    small_calls: int = 0
    parts: tuple[Entries, ...] = dataclasses.field(default=(), repr=False)
    taken_from: str = ""
    programs: tuple[TokenProgramEntry, ...] = ()

    @property
    def unfused(self) -> tuple[Missed, ...]:
        """What was missed and may be attention."""
        return tuple(m for m in self.missed if not m.is_routing)

    def counted(self) -> str:
        """How many of the places that look like attention were fused, in words."""
        total = len(self.attention) + len(self.missed)
        others = len(self.missed) - len(self.unfused)
        told = f" ({others} {'is' if others == 1 else 'are'} no attention)" if others else ""
        return f"{len(self.attention)} of {total} softmax-like places fused{told}"


def folded(entries: Sequence[AttentionEntry]) -> list[list[AttentionEntry]]:
    """Attentions in groups that are equal for a reader, in order of appearance."""
    groups: dict[tuple[object, ...], list[AttentionEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.kind, []).append(entry)
    return list(groups.values())
