"""Records of what a compilation found and did: an attention, a pass, and all of them together.

Plain records, filled in by passes and by the composition root, read by `report.py`, `dump.py` and the page.
They hold text and numbers, never a tensor or a node.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch

from attngraph.ir.records import dtype_of
from attngraph.reasons import IN_PIECES, OF_NUMBERS, OTHER, kind_of
from attngraph.report import as_torch
from attngraph.report.cache_entry import CacheEntry
from attngraph.report.ranks import ContextEntry, RanksEntry
from attngraph.report.user_code import UserCode
from attngraph.report.words import binary, gathered


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
        pair = f"{self.pair_absorbed:,} absorbed, {self.pair_expanded:,} expanded for a pair"
        return [f"{kept}, {self._order()}", f"operations: {pair}, {self.up:,} to expand a token"]

    def _order(self) -> str:
        if self.parameters is not None and self.operations is not None:
            (p, q), (a, b) = self.parameters, self.operations
            apart = f" (apart: {self.apart})" if self.apart else ""
            return f"folded: {p:,} -> {q:,} parameters, {a:,} -> {b:,} operations a token{apart}"
        if self.absorb != "auto":
            return f"{self.absorb} absorbed"
        if self.crossover is None:
            return "always absorbed, by cost"
        alone = f"(by operations alone {self.crossover_by_flops:,.0f})"
        return f"expanded from {self.crossover:,} new tokens of a row on, over many kept ones {alone}"

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

    def __post_init__(self) -> None:
        dtype_of(self.dtype)  # raises if there is none: a report may come from a file

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize


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
    the text of that line. `again`: which other attentions compute the same scores. `reads`: what r0, r1, ..
    are.
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
    again: str = ""
    reads: tuple[str, ...] = ()

    def heads_in_words(self) -> str:
        """`8 heads on 2 key/value heads of width 64`, `1 head of width 32 at each of 16 places of another
        axis`."""
        both, queries = self.axes
        heads = self.heads // math.prod((*both, *queries))
        kv_heads = self.kv_heads // math.prod(both)
        words = f"{heads:,} head{'s' * (heads != 1)}"
        words += f" on {kv_heads:,} key/value head{'s' * (kv_heads > 1)}" if heads != kv_heads else ""
        words += f", merged from {self.merged} attentions," if self.merged > 1 else ""
        words += f" of width {self.head_dim}"
        words += f" (values {self.value_dim})" if self.value_dim != self.head_dim else ""
        words += f", at each of {_places(both)} of another axis" if both else ""
        return words + (f", for queries at {_places(queries)} of another axis" if queries else "")

    def flex(self) -> str:
        """Python source of the same attention for FlexAttention: `mods(r0, ...)` gives `score_mod` and
        `mask_mod`, `attention(query, key, value, r0, ...)` calls them. `reads` tells what r0, r1, ... are;
        n0, n1, ... are sizes, by default those of the traced call.

        Raises:
            ValueError: FlexAttention cannot say it: says why.
        """
        return as_torch.flex(*self._in_torch())

    def sdpa(self) -> str:
        """The same for `scaled_dot_product_attention`: `attention(query, key, value, r0, ...)` calls it.

        Raises:
            ValueError: the operation cannot say it: says why.
        """
        dtype = torch.float32 if self.call is None else dtype_of(self.call.dtype)
        return as_torch.sdpa(*self._in_torch(), dtype)

    def _in_torch(self) -> tuple[str, tuple[int, ...], tuple[str, ...], bool]:
        numbers = () if self.call is None else self.call.numbers
        return self.program, numbers, self.reads, self.heads != self.kv_heads

    @property
    def kind(self) -> tuple[object, ...]:
        """A key by which attentions are equal for a reader: everything but where they are in the model."""
        skipped = ("name", "error", "reads")
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


def _places(axes: tuple[int, ...]) -> str:
    return f"{' x '.join(map(str, axes))} places"


@dataclasses.dataclass(frozen=True)
class Missed:
    """A softmax that was not fused: why, and where.

    `is_routing`: it is known to be no attention, because it chooses among a model's outputs (a router of
    experts, a sampler). `caller` and `code` as in `AttentionEntry`.
    """

    reason: str
    source: str
    name: str = ""
    is_routing: bool = False
    caller: str = ""
    code: str = ""


@dataclasses.dataclass(frozen=True)
class OtherEntry:
    """An attention without a softmax: what was done with it, or `reason`, why it is left as the model has it.
    The other fields are as in `Missed`."""

    source: str
    done: str = ""
    reason: str = ""
    name: str = ""
    caller: str = ""
    code: str = ""


@dataclasses.dataclass(frozen=True)
class Break:
    """Where capture of the whole model stopped, so that torch.compile captures it in pieces."""

    reason: str
    source: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Something that was left as the model has it, as data: the `code` of the kind of its `reason`, what to
    `change`, the user's line (`place`, as FILE:LINE), the line of a library that it calls (`inside`), and the
    `modules` in which it stands."""

    code: str
    change: str
    reason: str
    place: str
    inside: str = ""
    modules: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenProgramEntry:
    """A token program: what it computes for each token, the modules that have it, and its kernel."""

    program: str
    names: tuple[str, ...]
    kernel: KernelEntry


@dataclasses.dataclass(frozen=True)
class LaterEntry:
    """Results that are computed together when somebody looks at one of them, by their names in what the call
    returns, or of attributes. `what` (weights or scores) takes `bytes` then, and `multiplications` are made,
    at the sizes of the first call."""

    names: tuple[str, ...]
    what: str
    bytes: int
    multiplications: int

    @property
    def cost(self) -> str:
        return f"{self.what} of {binary(self.bytes)}, {self.multiplications:,} multiplications"


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

    `seconds` is what compiling took; `waited`, the last call that compiled, with what kernels compile when
    they first run. `numbers` says why torch could not vary sizes, so that calls with other sizes are compiled
    again. `retraces`: why calls were traced again, and how often. `capture`: the seconds of `seconds` that
    tracing took. `small_calls`: how many calls ran the model itself because fusing gains nothing at their
    sizes. `slower`: for sizes of calls at which the model itself was measured to be faster, milliseconds of
    the graph and of the model. `unordered` are operations whose results may differ in their last bits from
    batch to batch (None: consistent=True was not asked for).
    `captured` is the graph as it was traced, as text, `code` the user's lines that it comes from, `programs`
    its token programs, equal ones once. `later` are results that are computed when somebody looks at them,
    not in the call. Where there are several graphs, `parts` has the entries of each,
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
    slower: tuple[tuple[float, float], ...] = ()
    parts: "tuple[Entries, ...]" = dataclasses.field(default=(), repr=False)
    taken_from: str = ""
    programs: tuple[TokenProgramEntry, ...] = ()
    later: tuple[LaterEntry, ...] = ()
    others: tuple[OtherEntry, ...] = ()
    waited: float = 0.0
    unordered: tuple[str, ...] | None = None

    @property
    def unfused(self) -> tuple[Missed, ...]:
        """What was missed and may be attention."""
        return tuple(m for m in self.missed if not m.is_routing)

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place that was left as the model has it: softmaxes, attentions without one, latents, where
        capture stopped, and sizes that are numbers. Equal ones of several modules are one."""
        missed: list[Missed | OtherEntry] = [*self.missed, *(o for o in self.others if o.reason)]
        left = [(OTHER, m.reason, m.source, m.caller, m.name) for m in missed]
        latent = [(e, e.latent.reason) for e in self.attention if e.latent is not None and e.latent.reason]
        left += [(OTHER, reason, e.source, e.caller, e.name) for e, reason in latent]
        for otherwise, stops in ((IN_PIECES, self.breaks), (OF_NUMBERS, self.numbers)):
            left += [(otherwise, stop.reason, stop.source, "", "") for stop in stops]
        found = []
        for (otherwise, reason, source, caller), equal in gathered(left, lambda each: each[:4]):
            kind, names = kind_of(reason, otherwise), tuple(name for *_, name in equal if name)
            place, inside = (caller, source) if caller else (source, "")
            found.append(Place(kind.code, kind.change, reason, place, inside, names))
        return tuple(found)

    def took(self) -> str:
        """What compiling took, in words."""
        waited = f", in a call that took {self.waited:.2f} s" if self.waited else ""
        return f"compiled in {self.seconds:.2f} s{waited}"

    def counted(self) -> str:
        """How many of the places that look like attention were fused, in words."""
        total = len(self.attention) + len(self.missed)
        others = len(self.missed) - len(self.unfused)
        told = f" ({others} {'is' if others == 1 else 'are'} no attention)" if others else ""
        done = sum(not other.reason for other in self.others)
        count = len(self.others)
        without = f", {done} of {count} attention(s) without a softmax reassociated" if count else ""
        return f"{len(self.attention)} of {total} softmax-like places fused{told}{without}"


def folded(entries: Sequence[AttentionEntry]) -> list[list[AttentionEntry]]:
    """Attentions in groups that are equal for a reader, in order of appearance."""
    return [group for _, group in gathered(entries, lambda entry: entry.kind)]
