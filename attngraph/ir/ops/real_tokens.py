"""Values of tokens without those that a mask hides: `[1, N, ...]` in place of `[B, T, ...]` [packed batch].

`real_tokens` gives the places, in `B * T`, of the tokens that are computed. A row of which none is real is
computed whole: its weights follow from all its tokens where a finite number hides them. So is everything
where little would be saved. `packed` picks tokens, and `unpacked` puts them back, with zeros at the others'
places; where all are there, both only reshape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from attngraph.ir import budgets
from attngraph.ir.ops import memory
from attngraph.ir.ops.declare import Size, Sizes, declare, has_tangent, is_recorded, is_transformed


def _found(a: Any) -> Tensor:
    size: Callable[..., Any] = torch.library.get_ctx().new_dynamic_size
    return a.real.new_empty(size(min=2), dtype=torch.int64)  # type: ignore[no-any-return]


@declare(fake=_found, derivatives="places of tokens have none")
def real_tokens(real: Tensor, always: Sizes) -> Tensor:
    """`real`: which they are, `[B, T]`. `always`: tokens of each row that are computed in any case."""
    real = real | ~real.any(-1, keepdim=True)
    if always:
        real[:, always] = True
    places = real.flatten().nonzero().flatten()
    few = real.numel() - len(places) < budgets.PADDING * real.numel()
    return torch.arange(real.numel(), device=real.device) if few else places


@declare(schema="(Tensor(a) x, Tensor places, str how, SymInt rows, SymInt tokens) -> Tensor(a)")
def packed(x: Tensor, places: Tensor, how: str, rows: Size, tokens: Size) -> Tensor:
    flat = _by_row(x, how, rows, tokens)
    if not guard_or_false(places.shape[0] == rows * tokens):
        into = _memory(flat, places.shape[0])
        flat = flat.index_select(0, places) if into is None else torch.index_select(flat, 0, places, out=into)
    return flat if how.startswith("(") else flat.unsqueeze(0)


@declare(schema="(Tensor(a) x, Tensor places, str how, SymInt rows, SymInt tokens) -> Tensor(a)")
def unpacked(x: Tensor, places: Tensor, how: str, rows: Size, tokens: Size) -> Tensor:
    flat = x if how.startswith("(") else x.squeeze(0)
    if not guard_or_false(places.shape[0] == rows * tokens):
        into = _memory(flat, rows * tokens)
        zeros = flat.new_zeros(rows * tokens, *flat.shape[1:]) if into is None else into.zero_()
        flat = zeros.index_copy_(0, places, flat)
    if how == "(b t)":
        return flat
    whole = flat.reshape(rows, tokens, *flat.shape[1:])
    whole = whole if how == "b t" else whole.transpose(0, 1)
    return whole.flatten(0, 1) if how == "(t b)" else whole


def _memory(x: Tensor, count: int) -> Tensor | None:
    """Memory that was used before, for so many entries like those of x; None where more than numbers follow
    from it."""
    if is_recorded((x,)) or has_tangent((x,)) or is_transformed() or x.is_meta:
        return None
    return memory.empty((count, *x.shape[1:]), x.dtype, x.device)


def _by_row(x: Tensor, how: str, rows: int, tokens: int) -> Tensor:
    x = x.reshape(tokens, rows, *x.shape[1:]) if how == "(t b)" else x
    x = x.transpose(0, 1) if how in ("t b", "(t b)") else x
    return x if how == "(b t)" else x.flatten(0, 1)
