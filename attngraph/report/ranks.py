"""What a graph for several ranks divides and sends, as records of the report: text and numbers."""

import dataclasses
from collections.abc import Iterable, Iterator

from attngraph.report.words import Part, alike, from_to


@dataclasses.dataclass(frozen=True)
class DividedEntry:
    """What ranks divide: `count` heads, hidden units or rows of a table; or what is gathered again."""

    what: str
    name: str
    source: str
    count: int


CACHE_EXCHANGE = "exchange over the cache"
"""What is sent where ranks divide the tokens of a cache: queries and results."""


@dataclasses.dataclass(frozen=True)
class SentEntry:
    """A collective, or `CACHE_EXCHANGE`: `bytes_per_token` of its operand and `sent_per_token` by each rank,
    in a ring if all take part; for the whole call where its size does not grow with the tokens (`fixed`)."""

    what: str
    source: str
    bytes_per_token: int
    sent_per_token: int
    fixed: bool = False


@dataclasses.dataclass(frozen=True)
class RanksEntry:
    """What a graph for several ranks divides, what it sends, and what every rank has whole.

    `parameters`: the elements of all parameters, and of those that one rank holds. `whole` lists (parameter,
    elements, reason) of matrices that are not divided; `vectors` counts other parameters.
    """

    count: int
    divided: tuple[DividedEntry, ...] = ()
    sent: tuple[SentEntry, ...] = ()
    whole: tuple[tuple[str, int, str], ...] = ()
    vectors: int = 0
    parameters: tuple[int, int] = (0, 0)

    @property
    def sent_per_token(self) -> int:
        """Bytes that a rank sends for one token of a forward pass."""
        return sum(s.sent_per_token for s in self.sent if not s.fixed)

    def account(self) -> Part:
        """What is divided, what is sent, what is not divided and why."""
        everything, held = self.parameters
        head = f"{self.count}, a rank holds {held:,} of {everything:,} parameters"
        return Part("ranks   ", head, list(self._facts()))

    def _facts(self) -> Iterator[str]:
        for (what, count), divided in alike(self.divided, lambda e: (e.what, e.count)):
            names = from_to([divided[0].name or "the model", *(e.name for e in divided[1:])])
            yield f"{len(divided)} x {count:,} {what}   {names}{_at(divided[0])}"
        for (what, size), sent in alike(self.sent, lambda s: (s.what, s.bytes_per_token)):
            unit = "a call" if sent[0].fixed else "a token"
            yield f"{len(sent)} x {what} of {size:,} bytes {unit}   {sent[0].source}"
        yield f"sent by each rank: {self.sent_per_token:,} bytes a token, forward"
        for name, size, reason in self.whole:
            yield f"whole on every rank: {name} ({size:,} values): {reason}"
        if self.vectors:
            yield f"whole on every rank: {self.vectors} norm(s), bias(es) and other vectors"


@dataclasses.dataclass(frozen=True)
class DividedTokens:
    """A size that counts tokens, which ranks divide: in the example `tokens`, of which each rank has `chunks`
    runs; `attentions` of which each rank has the queries; `pairs` of a query and a key that each rank
    computes in one of them."""

    tokens: int
    chunks: int
    attentions: int
    pairs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class FetchedEntry:
    """What ranks fetch of each other: keys, or all tokens of a value.

    `bytes` that each rank receives in the example's call, and `back` in its backward pass; `mask`: in words,
    what the queries see; `at_most`: tensors of the call decide how much it is.
    """

    what: str
    source: str
    bytes: tuple[int, ...]
    back: tuple[int, ...]
    mask: str = ""
    at_most: bool = False


@dataclasses.dataclass(frozen=True)
class WholeEntry:
    """What every rank computes for all tokens, and why."""

    source: str
    reason: str


@dataclasses.dataclass(frozen=True)
class ContextEntry:
    """How ranks divide tokens, what they fetch, and what they do not divide. `sums`: how many gradients of
    values that all ranks have are added up in a backward pass, and their bytes."""

    count: int
    axes: tuple[DividedTokens, ...] = ()
    fetched: tuple[FetchedEntry, ...] = ()
    whole: tuple[WholeEntry, ...] = ()
    sums: tuple[int, int] = (0, 0)

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes that each rank receives in the forward pass of the example's call."""
        return tuple(sum(f.bytes[rank] for f in self.fetched) for rank in range(self.count))

    def account(self) -> Part:
        """Which tokens ranks have, what they fetch, what they compute whole and why."""
        return Part("tokens  ", f"divided among {self.count} ranks", list(self._facts()))

    def _facts(self) -> Iterator[str]:
        for axis in self.axes:
            runs = "one run" if axis.chunks == 1 else f"{axis.chunks} runs"
            most = max(axis.pairs) * len(axis.pairs) / (sum(axis.pairs) or 1) - 1
            yield (
                f"{axis.tokens // self.count} of {axis.tokens} tokens each, in {runs}: "
                f"{axis.attentions} attention(s), the busiest rank has {most:.0%} more than the mean"
            )
        for (what, mask, size, at_most), each in alike(
            self.fetched, lambda f: (f.what, f.mask, f.bytes, f.at_most)
        ):
            seen, limit = f" ({mask})" if mask else "", "at most " if at_most else ""
            yield f"{len(each)} x {what}{seen}: {limit}{_each(size)} bytes   {each[0].source}"
        yield f"received by each rank: {_each(self.received)} bytes in this call, forward"
        if self.sums[0]:
            yield f"added up backward: {self.sums[0]} gradient(s) of {self.sums[1]:,} bytes"
        for entry in dict.fromkeys(self.whole):
            yield f"all tokens on every rank: {entry.reason}{_at(entry)}"


@dataclasses.dataclass(frozen=True)
class CacheRanksEntry:
    """What each of `count` ranks keeps of what a decoder keeps.

    `heads`: for every attention that is divided, the key/value heads that a rank keeps, those that there
    are, and why ranks that keep the same do not divide its tokens ("": no others keep the same, or that was
    not asked for). `alike` lists (what, bytes, per, reason) of values that all ranks keep alike; `per`:
    "token", or "sequence" for carried values. `tokens` lists (what, bytes, team) of values of which each of
    `team` ranks keeps a part of the tokens: in the mean so many bytes of each token.
    """

    count: int
    heads: tuple[tuple[int, int, str], ...] = ()
    alike: tuple[tuple[str, int, str, str], ...] = ()
    tokens: tuple[tuple[str, int, int], ...] = ()

    def facts(self) -> Iterator[str]:
        """What is told below the whole cache."""
        for (kept, of, reason), equal in alike(self.heads, lambda h: h):
            shared = kept * self.count // of
            more = f"; {shared} ranks keep the same" if shared > 1 else ""
            more += f": {reason}" if reason else ""
            yield f"{len(equal)} x a rank keeps {kept} of {of} key/value heads{more}"
        for (size, team), divided in alike(self.tokens, lambda t: t[1:]):
            what = f"{len(divided)} value(s) of {size:,} bytes a token in the mean"
            yield f"a rank keeps 1 of {team} tokens: {what}   {from_to([t[0] for t in divided])}"
        for (size, per, reason), same in alike(self.alike, lambda a: a[1:]):
            what = f"{len(same)} value(s) of {size:,} bytes a {per}   {from_to([a[0] for a in same])}"
            yield f"kept by every rank: {what}: {reason}"


def _at(entry: DividedEntry | WholeEntry) -> str:
    return f"   {entry.source}" if entry.source else ""


def _each(sizes: Iterable[int]) -> str:
    return " ".join(f"{n:,}" for n in sizes)
