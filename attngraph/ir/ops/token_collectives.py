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

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attngraph.ir.ops.collectives import COLLECTIVES, Together, differentiated
from attngraph.ir.ops.sharing import shared
from attngraph.ir.ops.transforms import differentiate_by, has_tangent, is_recorded

torch.library.define(
    "attngraph::own_tokens", "(Tensor x, int dim, int[] chunks, int ranks, str group) -> Tensor"
)
torch.library.define(
    "attngraph::all_tokens", "(Tensor x, int dim, int[] chunks, int ranks, str group) -> Tensor"
)
torch.library.define(
    "attngraph::fetch_keys",
    "(Tensor x, Tensor[] reads, SymInt[] sizes, str program, int[] chunks, int ranks, str group) -> Tensor",
)
_OPS = torch.ops.attngraph
OWN_TOKENS, ALL_TOKENS, FETCH_KEYS = (
    _OPS.own_tokens.default, _OPS.all_tokens.default, _OPS.fetch_keys.default,
)  # fmt: skip
TOKENS = 2
"""The dimension of keys that counts tokens."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which tokens each rank has: of each rank its `chunks`, equal runs of neighbouring tokens."""

    chunks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, chunks: Sequence[int], ranks: int) -> Layout:
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

    def order(self, total: int) -> Tensor:
        """Where each token is, if the tokens of all ranks lie one after the other."""
        return self.tokens(total).flatten().argsort()


@functools.lru_cache(maxsize=64)
def _tokens(layout: Layout, total: int) -> Tensor:
    if total % layout.count:
        raise ValueError(f"{total} tokens cannot be divided into {layout.count} equal chunks.")
    size = total // layout.count
    first = torch.tensor(layout.chunks, device="cpu").unsqueeze(-1) * size
    return (first + torch.arange(size, device="cpu")).flatten(1)


class Needed(Protocol):
    """Tells which keys the queries of each rank may see: booleans, `[ranks, all tokens]`, on the CPU."""

    def __call__(
        self, program: str, reads: Sequence[Tensor], sizes: tuple[int, ...], layout: Layout, total: int
    ) -> Tensor: ...


NEEDED: list[Needed] = []
"""What decides it: `meaning/masks/needed.py`, which stands above this file, registers itself here."""


def needed_keys(
    program: str, reads: Sequence[Tensor], sizes: Sequence[int], layout: Layout, total: int
) -> Tensor:
    """The keys that each rank must have, its own not counted: booleans, `[ranks, all tokens]`."""
    return _plan(program, reads, tuple(map(int, sizes)), layout, total).needed


def _rank(group: str) -> int:
    about: Any = group
    return torch.distributed.get_rank(torch._C._distributed_c10d._resolve_process_group(about))


def _taken(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    return x.index_select(dim, layout.tokens(x.shape[dim])[rank].to(x.device))


def _ordered(x: Tensor, dim: int, layout: Layout) -> Tensor:
    """The tokens of all ranks, which lie one rank after the other, in their order."""
    return x.index_select(dim, layout.order(x.shape[dim]).to(x.device))


def _gathered(x: Tensor, dim: int, layout: Layout, group: str) -> Tensor:
    first = x.movedim(dim, 0).contiguous()
    found = _functional.wait_tensor(_functional.all_gather_into_tensor(first, layout.ranks, group))
    return _ordered(found, 0, layout).movedim(0, dim).contiguous()


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
    exchanges: dict[int, _Exchange] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def is_empty(self) -> bool:
        """Whether nobody needs anything."""
        return not bool(self.needed.any())

    def of(self, rank: int) -> _Exchange:
        if rank not in self.exchanges:
            tokens, ranks = self.layout.tokens(self.needed.shape[1]), range(self.layout.ranks)
            mine = self.needed[rank]
            self.exchanges[rank] = _Exchange(
                [self.needed[other][tokens[rank]].nonzero().flatten() for other in ranks],
                [tokens[other][mine[tokens[other]]] for other in ranks],
                tokens[rank],
            )
        return self.exchanges[rank]


def _plan(
    program: str, reads: Sequence[Tensor], sizes: tuple[int, ...], layout: Layout, total: int
) -> _Plan:  # fmt: skip
    """The plan of a fetch. One that tensors decide is shared within a run of a graph (`sharing.py`)."""
    if not reads:
        return _kept_plan(program, sizes, layout, total)
    kept = shared()
    if kept is None:
        return _plan_anew(program, sizes, layout, total, reads)
    key = "fetch_keys", program, sizes, layout, total, tuple(map(id, reads))
    if key not in kept:
        kept[key] = _plan_anew(program, sizes, layout, total, reads), reads  # so that no id is used again
    found: _Plan = kept[key][0]
    return found


def _plan_anew(
    program: str, sizes: tuple[int, ...], layout: Layout, total: int, reads: Sequence[Tensor] = ()
) -> _Plan:
    (decide,) = NEEDED
    found = decide(program, [r.detach() for r in reads], sizes, layout, total).clone()
    return _Plan(found.scatter_(1, layout.tokens(total), False), layout)


_kept_plan = functools.lru_cache(maxsize=64)(_plan_anew)


_functional = torch.ops._c10d_functional


def _swap(rows: Tensor, there: Sequence[Tensor], here: Sequence[Tensor], group: str) -> Tensor:
    """Begin to send the first len(there[0]) rows to rank 0 and so on. Returns memory for the rows that come,
    rank by rank: they are there once it is waited for."""
    counts = [[len(t) for t in places] for places in (here, there)]
    found: Tensor = _functional.all_to_all_single(rows.contiguous(), *counts, group)
    return found


@dataclasses.dataclass(frozen=True)
class Begun:
    """A fetch that has begun: what is sent is on its way, and `coming` is what arrives."""

    plan: _Plan
    group: str
    coming: Tensor | None

    @classmethod
    def of(cls, x: Tensor, plan: _Plan, group: str) -> Begun:
        """Begin to fetch the keys of a plan; `x` are the rank's own."""
        if plan.is_empty:
            return cls(plan, group, None)
        own = plan.of(_rank(group))
        sent = x.detach().movedim(TOKENS, 0)[torch.cat(own.sent).to(x.device)]
        return cls(plan, group, _swap(sent, own.sent, own.received, group))

    def with_own(self, x: Tensor) -> Tensor:
        """The keys in their places, once they have come."""
        own = self.plan.of(_rank(self.group))
        rows = x.movedim(TOKENS, 0)
        whole = rows.new_zeros((self.plan.needed.shape[1], *rows.shape[1:]))
        whole[own.own.to(x.device)] = rows
        if self.coming is not None:
            whole[torch.cat(own.received).to(x.device)] = _functional.wait_tensor(self.coming)
        return whole.movedim(0, TOKENS)


def _returned(grad: Tensor, plan: _Plan, group: str) -> Tensor:
    """The gradient of a rank's own keys: what it has itself, and what those have who fetched them."""
    own = plan.of(_rank(group))
    rows = grad.movedim(TOKENS, 0)
    total = rows[own.own.to(grad.device)]
    if not plan.is_empty:
        sent = rows[torch.cat(own.received).to(grad.device)]
        back = _functional.wait_tensor(_swap(sent, own.received, own.sent, group))
        total = total.index_add(0, torch.cat(own.sent).to(grad.device), back)
    return total.movedim(0, TOKENS)


def _plan_of(x: Tensor, reads: Sequence[Tensor], sizes: Sequence[int], program: str, layout: Layout) -> _Plan:
    """The plan of one call of `fetch_keys`."""
    return _plan(program, reads, tuple(map(int, sizes)), layout, x.shape[TOKENS] * layout.ranks)


# --- kernels, shapes and gradients ---


@torch.library.impl("attngraph::own_tokens", "CompositeExplicitAutograd")
def _own_tokens(x: Tensor, dim: int, chunks: list[int], ranks: int, group: str) -> Tensor:
    return _taken(x, dim, Layout.of(chunks, ranks), _rank(group))


@torch.library.impl("attngraph::all_tokens", "CompositeExplicitAutograd")
def _all_tokens(x: Tensor, dim: int, chunks: list[int], ranks: int, group: str) -> Tensor:
    return _gathered(x, dim, Layout.of(chunks, ranks), group)


@torch.library.impl("attngraph::fetch_keys", "CompositeExplicitAutograd")
def _fetch_keys(
    x: Tensor, reads: list[Tensor], sizes: list[int], program: str, chunks: list[int], ranks: int, group: str
) -> Tensor:
    layout = Layout.of(chunks, ranks)
    return Begun.of(x, _plan_of(x, reads, sizes, program, layout), group).with_own(x)


@torch.library.register_fake("attngraph::own_tokens")  # type: ignore[untyped-decorator]
def _own_shape(x: Tensor, dim: int, chunks: list[int], ranks: int, group: str) -> Tensor:
    count = len(chunks)
    return x.new_empty([n // count * (count // ranks) if d == dim else n for d, n in enumerate(x.shape)])


@torch.library.register_fake("attngraph::all_tokens")  # type: ignore[untyped-decorator]
def _all_shape(x: Tensor, dim: int, chunks: list[int], ranks: int, group: str) -> Tensor:
    return x.new_empty([n * ranks if d == dim else n for d, n in enumerate(x.shape)])


@torch.library.register_fake("attngraph::fetch_keys")  # type: ignore[untyped-decorator]
def _fetched_shape(
    x: Tensor, reads: Any, sizes: Any, program: str, chunks: Any, ranks: int, group: str
) -> Tensor:
    shape = [x.shape[TOKENS] * ranks, *(n for d, n in enumerate(x.shape) if d != TOKENS)]
    return x.new_empty(shape).movedim(0, TOKENS)


class _OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, chunks: list[int], ranks: int, group: str) -> Tensor:
        ctx.about = dim, Layout.of(chunks, ranks), group
        return _taken(x.detach(), dim, ctx.about[1], _rank(group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _gathered(grad, *ctx.about), None, None, None, None


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, chunks: list[int], ranks: int, group: str) -> Tensor:
        ctx.about = dim, Layout.of(chunks, ranks), _rank(group)
        return _gathered(x.detach(), dim, ctx.about[1], group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _taken(grad, *ctx.about), None, None, None, None


class _Fetched(torch.autograd.Function):
    """The keys of a fetch that has begun, with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begun: Begun) -> Tensor:
        ctx.about = begun.plan, begun.group
        return begun.with_own(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _returned(grad, *ctx.about), None


def begin_fetch(
    x: Tensor, reads: list[Tensor], sizes: list[int], program: str, chunks: list[int], ranks: int, group: str
) -> Begun:
    """Begin what `fetch_keys` does with these arguments, and do not wait for it."""
    return Begun.of(x, _plan_of(x, reads, sizes, program, Layout.of(chunks, ranks)), group)


def finish_fetch(x: Tensor, begun: Begun) -> Tensor:
    """What `fetch_keys` gives, of a fetch of `x` that has begun; gradients as there."""
    if has_tangent((x,)):
        raise NotImplementedError(f"{FETCH_KEYS} has no forward-mode derivative.")
    found: Tensor = _Fetched.apply(x, begun) if is_recorded((x,)) else begun.with_own(x)
    return found


class _FetchKeys:
    """`fetch_keys` with gradients: begun and finished at once."""

    @staticmethod
    def apply(x: Tensor, *about: Any) -> Tensor:
        return finish_fetch(x, begin_fetch(x, *about))


differentiate_by("own_tokens", differentiated(OWN_TOKENS, _OwnTokens))
differentiate_by("all_tokens", differentiated(ALL_TOKENS, _AllTokens))
differentiate_by("fetch_keys", differentiated(FETCH_KEYS, _FetchKeys))


# --- all ranks in one process ---


class _TogetherOwn(torch.autograd.Function):
    """`own_tokens` of all ranks: the gradient of each rank's copy is that of all parts."""

    @staticmethod
    def forward(ctx: Any, dim: int, layout: Layout, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.about = dim, layout
        return tuple(_taken(v.detach(), dim, layout, rank) for rank, v in enumerate(values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        whole = _ordered(torch.cat(grads, ctx.about[0]), *ctx.about)
        return (None, None, *(whole for _ in grads))


def _own_together(args: Sequence[Any], parts: Sequence[Tensor]) -> list[Tensor]:
    dim, chunks, ranks, _ = args
    return list(_TogetherOwn.apply(dim, Layout.of(chunks, ranks), *parts))


def _all_together(args: Sequence[Any], parts: Sequence[Tensor]) -> list[Tensor]:
    dim, chunks, ranks, _ = args
    layout = Layout.of(chunks, ranks)
    # A rank's gradient of its own part is that of its own result alone.
    mine = ([p if r == rank else p.detach() for r, p in enumerate(parts)] for rank in range(ranks))
    return [_ordered(torch.cat(of, dim), dim, layout) for of in mine]


def _fetch_together(args: Sequence[Any], parts: Sequence[Tensor]) -> list[Tensor]:
    reads, sizes, program, chunks, ranks, _ = args
    layout = Layout.of(chunks, ranks)
    whole = _ordered(torch.cat(tuple(parts), TOKENS), TOKENS, layout)
    needed = _plan_of(parts[0], reads, sizes, program, layout).needed
    there = needed.scatter(1, layout.tokens(whole.shape[TOKENS]), True)
    return [torch.where(t.unsqueeze(-1).to(whole.device), whole, 0.0) for t in there]


_TOGETHER: dict[Any, Together] = {
    OWN_TOKENS: _own_together, ALL_TOKENS: _all_together, FETCH_KEYS: _fetch_together,
}  # fmt: skip
COLLECTIVES.update(_TOGETHER)
