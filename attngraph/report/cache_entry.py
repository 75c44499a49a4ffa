"""What a report says of a decoder's cache: bytes per token and per sequence, proof, and drift by rounding."""

import dataclasses
from collections.abc import Iterable, Iterator

from attngraph.ir.ops.cached_attention import in_ring
from attngraph.report.ranks import CacheRanksEntry
from attngraph.report.words import Part, alike, binary, from_to

EXAMPLE_BATCH, EXAMPLE_LENGTH = 32, 4096
"""The sizes of the example in a report's text."""


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
        kl = f"KL divergence is {self.mean:.1e} in the mean, {self.largest:.1e} at most"
        same = f"the likeliest token is the same for {self.same:,}"
        return f"over {self.tokens:,} tokens the logits' {kl}; {same}"


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """What a derived decoder keeps.

    `bytes_per_token` is for all layers together; `expanded` what keys and values of every query head would
    take; `stores` lists (what, bytes per entry, window or None, tokens that have an entry together). `fixed`
    values are computed once for a
    prompt. `most_tokens` is the longest sequence the model takes (None: no limit is known). `error` is the
    largest difference to the whole sequence, in float64, relative to the largest logit (None: not compared).
    Where a window is kept, so are `rollback` more tokens; a row's room is a multiple of `page` tokens.
    `unset` are attributes that the model's forward sets and the decoder does not; `unchecked` are lines that
    raise for certain values in the model, but not in the decoder.
    `carried` lists (what, bytes) of values of which each sequence has one, whatever its length; `anew` the
    lines of values that every step computes from all that is kept. Where several ranks keep it, all of this
    is what one of them keeps, and `ranks` says how it is divided.
    `rounded` is the dtype of 8 bits in which keys and values are kept with scales ("": none are), `drift`
    what that changes (None: not measured), `unrounded` what is kept as it is computed although it was asked
    to be rounded. `assumed` are operations that are taken not to look at later tokens because
    `CacheConfig.assume_causal` says so, and why that could not be shown. `asked` are the lines of attentions
    of which each call asks that data do not hide a token from itself. `begins` is with how many learned
    places a row begins, which take as much as tokens. `ruled` says by which rule the entries of arguments go
    on that belong to pairs of tokens.
    """

    bytes_per_token: int
    expanded: int
    attentions: int
    stores: tuple[tuple[str, int, int | None, int], ...]
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
    assumed: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    begins: int = 0
    ruled: tuple[str, ...] = ()

    @property
    def bytes_per_row(self) -> int:
        """What a sequence needs whatever its length: carried values, and what windows keep."""
        windows = ((size, window) for _, size, window, _ in self.stores if window is not None)
        return self._carried() + sum(size * in_ring(window, self.rollback) for size, window in windows)

    def _carried(self) -> int:
        return sum(size for _, size in self.carried)

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
            places = length + self.begins
            tokens = places if window is None else in_ring(window, self.rollback)
            return -(-tokens // self.page) * self.page if length else 0

        kept = sum(size * room(window) // each for _, size, window, each in self.stores)
        return batch * (kept + self._carried())

    def account(self) -> Part:
        """What is kept, what that needs, and how it was checked."""
        on_each = "" if self.ranks is None else f" on each of {self.ranks.count} ranks"
        head = f"{self.bytes_per_token:,} bytes per token{on_each}"
        if self.attentions:
            head += f", {self.bytes_per_token / self.attentions:,.0f} per attention"
        if self.bytes_per_row:
            head += f", {self.bytes_per_row:,} bytes per sequence whatever its length"
        return Part("cache   ", head, [*self._kept(), *self._limits()])

    def _kept(self) -> Iterator[str]:
        if self.expanded:
            yield f"keys and values of every query head would be {self.expanded:,}"
        for (size, window, each), stores in alike(self.stores, lambda s: s[1:]):
            kept, names = "all tokens" if window is None else f"the last {window}", [s[0] for s in stores]
            per = "per token" if each == 1 else f"for each {each} tokens"
            yield f"{len(names)} value(s) of {size:,} bytes {per}, {kept}   {from_to(names)}"
        if self.begins:
            yield f"each sequence begins with {self.begins} learned places, which take as much as tokens"
        if self.carried:
            yield f"{len(self.carried)} value(s) of {self._carried():,} bytes in all, one for each sequence"
        length = min(self.most_tokens or EXAMPLE_LENGTH, EXAMPLE_LENGTH)
        one, many = (binary(self.bytes(batch, length)) for batch in (1, EXAMPLE_BATCH))
        yield f"{length:,} tokens: {one} for one sequence, {many} for {EXAMPLE_BATCH}"
        if self.fixed:
            yield f"{self.fixed} value(s) computed once for a prompt"
        if self.anew:
            lines = _once(self.anew)
            yield f"{len(self.anew)} value(s) computed from all that is kept at every step: {lines}"

    def _limits(self) -> Iterator[str]:
        yield from self.ruled
        if self.assumed:
            taken = "not shown to look at earlier tokens alone, but taken to (assume_causal)"
            yield f"{taken}: {_once(self.assumed)}"
        if self.asked:
            what = "that data do not hide a token from itself by a finite number is asked in each call"
            yield f"{what}: {_once(self.asked)}"
        if self.most_tokens is not None:
            yield f"at most {self.most_tokens:,} tokens in a sequence"
        yield from () if self.ranks is None else self.ranks.facts()
        for what, names in (("set", self.unset), ("checked", self.unchecked)):
            if names:
                yield f"not {what}, unlike by the model's own forward(): {', '.join(names)}"
        if self.rounded:
            drift = self.drift or "what that changes was not measured"
            yield f"approximate: kept as {self.rounded} with a scale for each token and head; {drift}"
        if self.unrounded:
            kept = f"{len(self.unrounded)} value(s) kept as computed, not in 8 bits"
            yield f"{kept} (the pass quantise-cache says why): {_once(self.unrounded)}"
        if self.error is None:
            yield "not compared with whole sequences"
        else:
            rounding = ", before rounding" * bool(self.rounded)
            yield f"equal to whole sequences in float64 (error {self.error:.0e}){rounding}"


def _once(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
