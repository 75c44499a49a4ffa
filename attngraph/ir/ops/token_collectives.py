"""Collectives along the token axis: a rank's own tokens, all ranks' tokens, and the keys that a rank needs.

    attngraph::own_tokens(x, dim, chunks, ranks, group) -> Tensor    a rank's tokens of a value that all have
    attngraph::all_tokens(x, dim, chunks, ranks, group) -> Tensor    the tokens of all ranks, in their order
    attngraph::fetch_keys(x, reads, sizes, program, chunks, ranks, group) -> Tensor

Tokens are divided in equal chunks, and `chunks` lists those of rank 0, then those of rank 1, and so on.
`fetch_keys` has `x`, `[B, H, own tokens, D]`, and gives `[B, H, all tokens, D]` with zeros in place of the
keys that no query of the rank sees by the masks of `program`, over `reads` and `sizes`, which number all
tokens: these are not sent. Which they are every rank knows of every other, so one all-to-all is enough.

Gradients are those of losses that are equal on all ranks (`collectives.py`): of `own_tokens` the ranks' parts
side by side, of `all_tokens` the rank's own part, and of `fetch_keys` the sum of what the ranks that
fetched a key have, which is sent back the same way.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.kept import kept
from attngraph.ir.ops.collectives import COLLECTIVES, FUNCTIONAL, collective, for_each, gathered, rank_in

from attngraph.ir.ops.declare import (  # isort: skip
    Sizes, declare, differentiated, has_tangent, is_recorded, shared, with_gradients,
)  # fmt: skip

TOKENS = 2
"""The dimension of keys that counts tokens."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which tokens each rank has: of each rank its `chunks`, equal runs of neighbouring tokens."""

    chunks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, chunks: Sequence[int], ranks: int) -> "Layout":
        """The layout that an op's arguments tell."""
        each = len(chunks) // ranks
        return cls(tuple(tuple(chunks[r * each : (r + 1) * each]) for r in range(ranks)))

    @property
    def flat(self) -> list[int]:
        """The chunks of all ranks, as an argument of an op."""
        return [chunk for own in self.chunks for chunk in own]

    @property
    def ranks(self) -> int:
        return len(self.chunks)

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self.flat)

    def tokens(self, total: int) -> Tensor:
        """The tokens of each rank, `[ranks, own tokens]`."""
        return _tokens(self, total)

    def ordered(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of all ranks, which lie one rank after the other, in their order."""
        return x.index_select(dim, self.tokens(x.shape[dim]).flatten().argsort().to(x.device))


@functools.lru_cache(maxsize=64)
def _tokens(layout: Layout, total: int) -> Tensor:
    if total % layout.count:
        raise ValueError(f"{total} tokens cannot be divided into {layout.count} equal chunks.")
    size = total // layout.count
    first = torch.tensor(layout.chunks, device="cpu").unsqueeze(-1) * size
    return (first + torch.arange(size, device="cpu")).flatten(1)


NEEDED: list[Callable[[str, Sequence[Tensor], tuple[int, ...], Layout, int], Tensor]] = []
"""Tells which keys the queries of each rank may see, by program, reads, sizes, layout and number of tokens:
booleans, `[ranks, all tokens]`, on the CPU. `meaning/masks/tiles.py`, which is above, registers itself."""


def needed_keys(
    program: str, reads: Sequence[Tensor], sizes: Sequence[int], layout: Layout, total: int
) -> Tensor:
    """The keys that each rank must have, its own not counted: booleans, `[ranks, all tokens]`."""
    return _plan(program, reads, sizes, layout, total).needed


def _taken(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    return x.index_select(dim, layout.tokens(x.shape[dim])[rank].to(x.device))


def _gathered(x: Tensor, dim: int, layout: Layout, group: str) -> Tensor:
    return layout.ordered(gathered(x, dim, layout.ranks, group), 0).movedim(0, dim).contiguous()


# --- keys ---


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """What one rank sends and receives: its own tokens by their place in its part, one list for each rank
    that they go to, and tokens by their number, one list for each rank that they come from."""

    sent: list[Tensor]
    received: list[Tensor]
    own: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """Which keys each rank needs of others, `[ranks, all tokens]`, and what follows for each rank."""

    needed: Tensor
    layout: Layout

    @functools.cached_property
    def is_empty(self) -> bool:
        """Whether nobody needs anything."""
        return not bool(self.needed.any())

    @kept
    def of(self, rank: int) -> _Exchange:
        tokens, ranks = self.layout.tokens(self.needed.shape[1]), range(self.layout.ranks)
        mine = self.needed[rank]
        return _Exchange(
            [self.needed[other][tokens[rank]].nonzero().flatten() for other in ranks],
            [tokens[other][mine[tokens[other]]] for other in ranks],
            tokens[rank],
        )


def _plan(program: str, reads: Sequence[Tensor], sizes: Sequence[int], layout: Layout, total: int) -> _Plan:
    """The plan of a fetch. One that tensors decide is shared within a run of a graph (`declare.py`)."""
    about = program, tuple(map(int, sizes)), layout, total
    if not reads:
        return _kept_plan(*about)
    kept = shared()
    if kept is None:
        return _plan_anew(*about, reads)
    key = "fetch_keys", *about, tuple(map(id, reads))
    if key not in kept:
        kept[key] = _plan_anew(*about, reads), reads  # so that no id is used again
    found: _Plan = kept[key][0]
    return found


def _plan_anew(
    program: str, sizes: tuple[int, ...], layout: Layout, total: int, reads: Sequence[Tensor] = ()
) -> _Plan:
    (decide,) = NEEDED
    found = decide(program, [r.detach() for r in reads], sizes, layout, total).clone()
    return _Plan(found.scatter_(1, layout.tokens(total), False), layout)


_kept_plan = functools.lru_cache(maxsize=64)(_plan_anew)


def _swap(rows: Tensor, there: Sequence[Tensor], here: Sequence[Tensor], group: str) -> Tensor:
    """Begin to send the first len(there[0]) rows to rank 0 and so on. Returns memory for the rows that come,
    rank by rank: they are there once it is waited for."""
    counts = [[len(t) for t in places] for places in (here, there)]
    found: Tensor = FUNCTIONAL.all_to_all_single(rows.contiguous(), *counts, group)
    return found


@dataclasses.dataclass(frozen=True)
class Begun:
    """A fetch that has begun: what is sent is on its way, and `coming` is what arrives."""

    plan: _Plan
    group: str
    coming: Tensor | None

    def with_own(self, x: Tensor) -> Tensor:
        """The keys in their places, once they have come."""
        own = self.plan.of(rank_in(self.group))
        rows = x.movedim(TOKENS, 0)
        whole = rows.new_zeros((self.plan.needed.shape[1], *rows.shape[1:]))
        whole[own.own.to(x.device)] = rows
        if self.coming is not None:
            whole[torch.cat(own.received).to(x.device)] = FUNCTIONAL.wait_tensor(self.coming)
        return whole.movedim(0, TOKENS)


def _returned(grad: Tensor, plan: _Plan, group: str) -> Tensor:
    """The gradient of a rank's own keys: what it has itself, and what those have who fetched them."""
    own = plan.of(rank_in(group))
    rows = grad.movedim(TOKENS, 0)
    total = rows[own.own.to(grad.device)]
    if not plan.is_empty:
        sent = rows[torch.cat(own.received).to(grad.device)]
        back = FUNCTIONAL.wait_tensor(_swap(sent, own.received, own.sent, group))
        total = total.index_add(0, torch.cat(own.sent).to(grad.device), back)
    return total.movedim(0, TOKENS)


# --- the operations ---


def _of_all(parts: Sequence[Tensor], dim: int, chunks: list[int]) -> Tensor:
    return Layout.of(chunks, len(parts)).ordered(torch.cat(tuple(parts), dim), dim)


@collective(
    fake=lambda a: a.x.new_empty([
        n // len(a.chunks) * (len(a.chunks) // a.ranks) if d == a.dim else n for d, n in enumerate(a.x.shape)
    ]),
    gradient=lambda grad, dim, chunks, ranks, group: _gathered(grad, dim, Layout.of(chunks, ranks), group),
    together=lambda args, parts: with_gradients(
        lambda values: [
            _taken(v, args[0], Layout.of(args[1], len(values)), rank) for rank, v in enumerate(values)
        ],
        lambda grads: [_of_all(grads, *args[:2])] * len(grads), *parts,
    ),
)  # fmt: skip
def _own_tokens(x: Tensor, dim: int, chunks: list[int], ranks: int, group: str) -> Tensor:
    return _taken(x, dim, Layout.of(chunks, ranks), rank_in(group))


@collective(
    fake=lambda a: a.x.new_empty([n * a.ranks if d == a.dim else n for d, n in enumerate(a.x.shape)]),
    gradient=_own_tokens,
    together=lambda args, parts: for_each(parts, lambda own: _of_all(own, *args[:2])),
)
def _all_tokens(x: Tensor, dim: int, chunks: list[int], ranks: int, group: str) -> Tensor:
    return _gathered(x, dim, Layout.of(chunks, ranks), group)


def begin_fetch(
    x: Tensor, reads: list[Tensor], sizes: list[int], program: str, chunks: list[int], ranks: int, group: str
) -> Begun:
    """Begin what `fetch_keys` does with these arguments, and do not wait for it."""
    plan = _plan(program, reads, sizes, Layout.of(chunks, ranks), x.shape[TOKENS] * ranks)
    if plan.is_empty:
        return Begun(plan, group, None)
    own = plan.of(rank_in(group))
    sent = x.detach().movedim(TOKENS, 0)[torch.cat(own.sent).to(x.device)]
    return Begun(plan, group, _swap(sent, own.sent, own.received, group))


def finish_fetch(x: Tensor, begun: Begun) -> Tensor:
    """What `fetch_keys` gives, of a fetch of `x` that has begun; gradients as there."""
    if has_tangent((x,)):
        raise NotImplementedError("attngraph::fetch_keys has no forward-mode derivative.")
    if not is_recorded((x,)):
        return begun.with_own(x)
    plan, group = begun.plan, begun.group
    return with_gradients(
        lambda own: [begun.with_own(own[0])], lambda grads: [_returned(grads[0], plan, group)], x
    )[0]


@declare(
    fake=lambda a: a.x.new_empty(
        [a.x.shape[TOKENS] * a.ranks, *(n for d, n in enumerate(a.x.shape) if d != TOKENS)]
    ).movedim(0, TOKENS), runs=False,
    derivatives=differentiated("fetch_keys", lambda x, *about: finish_fetch(x, begin_fetch(x, *about))),
)  # fmt: skip
def _fetch_keys(
    x: Tensor, reads: list[Tensor], sizes: Sizes, program: str, chunks: list[int], ranks: int, group: str
) -> Tensor:
    return begin_fetch(x, reads, sizes, program, chunks, ranks, group).with_own(x)


def _fetch_together(args: Sequence[Any], parts: Sequence[Tensor]) -> list[Tensor]:
    reads, sizes, program, chunks, ranks, _ = args
    layout, whole = Layout.of(chunks, ranks), _of_all(parts, TOKENS, chunks)
    total = whole.shape[TOKENS]
    there = needed_keys(program, reads, sizes, layout, total).scatter(1, layout.tokens(total), True)
    return [torch.where(t.unsqueeze(-1).to(whole.device), whole, 0.0) for t in there]


_OPS = torch.ops.attngraph
OWN_TOKENS, ALL_TOKENS, FETCH_KEYS = (
    _OPS.own_tokens.default, _OPS.all_tokens.default, _OPS.fetch_keys.default,
)  # fmt: skip
COLLECTIVES[FETCH_KEYS] = _fetch_together
