"""How many floating-point operations our ops take: formulas for `torch.utils.flop_counter.FlopCounterMode`.

The convention. A product of matrices counts two operations for each pair of numbers multiplied, as PyTorch
counts it; exponentials and masks count nothing. Of an attention that is computed by tiles, a tile of `TILE`
queries by `TILE` keys counts in full unless positions and sizes show that the mask hides all of it. Masks
that read tensors count as if they hid nothing, so the count depends on shapes alone. Without a mask it is the
count of the two products of the unfused model. The backward pass counts five products, as PyTorch's own fused
attention does: the scores again, and one for each of the gradients of weights, values, queries and keys.
Which kernel computes a call does not matter.

`attngraph::linear_attention` consists of PyTorch's products, which PyTorch counts.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from attngraph.ir.language import ScoreProgram, parse, token_program
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Rows, counts, shift
from attngraph.ir.ops.latent_attention import LatentNode
from attngraph.meaning.masks.tiles import SKIP, Cut, Grid, block_map

TILE = 64
_AT_ONCE = 1 << 20
"""Tiles that are looked at together."""
ops = torch.ops.attngraph


@_disable_current_modes()  # tiles have numbers, also where somebody counts on tensors without data
def computed_pairs(
    program: ScoreProgram, batch: int, heads: int, queries: int, keys: int, sizes: Sequence[int] = ()
) -> int:
    """How many pairs of a query and a key lie in tiles that the mask does not hide by positions and sizes."""
    if 0 in (batch, heads, queries, keys):
        return 0
    names = {v.value for e in program.expressions for v in e.free}
    b = Cut(0, batch, 1) if "b" in names else Cut(0, 1, 1)
    h = Cut(0, heads, 1) if "h" in names else Cut(0, 1, 1)
    step = TILE * max(1, _AT_ONCE // (b.count * h.count * math.ceil(keys / TILE)))
    widths = torch.tensor([min(TILE, keys - start) for start in range(0, keys, TILE)])
    found = 0
    for first in range(0, queries, step):
        q = Cut(first, min(queries, first + step), TILE)
        heights = torch.tensor([min(TILE, q.stop - start) for start in range(first, q.stop, TILE)])
        computed = block_map(program, Grid(b, h, q, Cut(0, keys, TILE), tuple(sizes))) != SKIP
        pairs = int((computed * heights[:, None] * widths).sum())
        found += pairs * (batch // computed.shape[0]) * (heads // computed.shape[1])
    return found


def _numbers(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in shape)


def _pairs(q: Sequence[Any], k: Sequence[Any], sizes: Sequence[Any], program: ScoreProgram) -> int:
    batch, heads, queries, _ = _numbers(q)
    return computed_pairs(program, batch, heads, queries, int(k[2]), _numbers(sizes))


@register_flop_formula(ops.attention_backward)
def _attention_backward(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int],
    reads: Any, sizes: Sequence[int], program: str, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return 2 * _pairs(q, k, sizes, parse(program)) * int(3 * q[3] + 2 * v[3])


@register_flop_formula(ops.token_program, get_raw=True)
def _token_program(given: Sequence[Tensor], program: str, *_: Any, **__: Any) -> int:
    """Of the products with weights."""
    parsed = token_program.parse(program)
    tokens = next(
        t.shape[about.token_dim]
        for t, about in zip(given, parsed.given, strict=True) if about.token_dim is not None
    )  # fmt: skip
    numbers = range(len(given), len(given) + len(parsed.definitions))
    weights = [given[p.weight] for p in map(parsed.product, numbers) if p is not None]
    return sum(2 * tokens * weight.numel() for weight in weights)


def _pairs_of_rows(fresh: int, page: int, view: nodes.Cached) -> list[int]:
    """The pairs of each row of a step: its new queries, with its kept and its new keys."""
    moved, count = shift(view.program)
    rows = Rows(view.table, view.starts, view.first, view.held)
    given = [*_numbers(view.sizes), *([0] * (count - len(view.sizes)))]
    found = []
    for row, (new, first, held) in enumerate(zip(*counts(rows), strict=True)):
        oldest = max(0, held - rows.table.shape[1] * page)
        keys = held - oldest + (new if fresh else 0)
        found.append(computed_pairs(moved, 1, view.q.shape[1], new, keys, (*given, row, first, oldest)))
    return found


def _attention(view: nodes.Attention) -> int:
    pairs = _pairs(view.q.shape, view.k.shape, view.sizes, view.program)
    return 2 * pairs * int(view.q.shape[3] + view.v.shape[3])


def _cached_attention(view: nodes.CachedAttention) -> int:
    pairs = _pairs_of_rows(view.k.shape[2], view.k_pages.shape[2], view)
    return 2 * sum(pairs) * int(view.q.shape[3] + view.v.shape[3])


def _latent_attention(view: nodes.LatentAttention) -> int:
    (batch, _heads, new, _width), keys = view.q.shape, view.latent.shape[2]
    pairs = _pairs(view.q.shape, view.latent.shape, view.sizes, view.program)
    return _of_latents(view, [(new, max(0, keys - new))] * batch, pairs, batch * new, batch * keys)


def _cached_latent_attention(view: nodes.CachedLatentAttention) -> int:
    page = view.pages.shape[2]
    news, _first, kept = counts(Rows(view.table, view.starts, view.first, view.held))
    pairs = sum(_pairs_of_rows(view.latent.shape[2], page, view))
    keys = sum(min(n, view.table.shape[1] * page) for n in kept) + view.latent.shape[2]
    return _of_latents(view, list(zip(news, kept, strict=True)), pairs, view.q.shape[2], keys)


def _of_latents(
    view: nodes.LatentAttention, rows: Sequence[tuple[int, int]], pairs: int, queries: int, keys: int
) -> int:
    """Operations of all pairs, and of projecting queries and results, or keys and values."""
    node = LatentNode(view.q, view.latent, view.key_up, view.value_up, view.values)
    about = node.sizes
    if node.absorbs(view.absorb, rows, view.q):
        return pairs * about.pair_absorbed // about.heads + queries * about.query_up
    return pairs * about.pair_expanded // about.heads + keys * about.up


def _of_view(op: Any, formula: Callable[[Any], int]) -> None:
    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(nodes.called(op.default, args, kwargs))

    register_flop_formula(op, get_raw=True)(counted)


_of_view(ops.attention, _attention)
_of_view(ops.cached_attention, _cached_attention)
_of_view(ops.latent_attention, _latent_attention)
_of_view(ops.cached_latent_attention, _cached_latent_attention)
