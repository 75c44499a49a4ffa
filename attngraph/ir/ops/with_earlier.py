"""New tokens of a decoder's step with the tokens before them: what a window over tokens reads.

    attngraph::with_earlier(pages, new, table, starts, first, place, row_dim, dim, back) -> longer

A step computes new tokens of several rows, packed into one sequence (`ir/ops/cached_attention.py`). In the
result every row's new tokens are preceded by the `back` tokens before them, taken from the row's pages, and
by zeros where the row begins. So a token's window never reaches into another row. `place` says where each
new token stands in the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import INSTEAD, Rows, counts
from attngraph.ir.ops.transforms import refuse_derivatives

torch.library.define(
    "attngraph::with_earlier",
    "(Tensor pages, Tensor new, Tensor table, Tensor starts, Tensor first, Tensor place, int row_dim, "
    "int dim, int back) -> Tensor",
)


@torch.library.impl("attngraph::with_earlier", "CompositeExplicitAutograd")
def _with_earlier(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, place: Tensor, row_dim: int,
    dim: int, back: int,
) -> Tensor:  # fmt: skip
    value = new.movedim((row_dim, dim), (0, 1))[0]  # [N, ...]
    store = pages.movedim((row_dim, dim), (0, 1))  # [pages, page, ...]
    rows, page = first.shape[0], store.shape[1]
    own = (-1, *(1 for _ in value.shape[1:]))
    before = first.unsqueeze(1) + torch.arange(-back, 0, device=first.device)  # [rows, back]
    slot = before % (table.shape[1] * page)
    held = store[table.gather(1, slot // page).flatten(), (slot % page).flatten()].to(value.dtype)
    held.masked_fill_((before < 0).flatten().reshape(own), 0)
    lengths = counts(Rows(table, starts, first, first)).new
    if all(length == 1 for length in lengths):
        shape = (rows, back, *value.shape[1:])
        longer = torch.cat([held.reshape(shape), value.unsqueeze(1)], 1).flatten(0, 1)
    else:
        heads = starts[:-1].unsqueeze(1) + torch.arange(rows * back, device=starts.device).view(rows, back)
        longer = value.new_empty((value.shape[0] + rows * back, *value.shape[1:]))
        longer[heads.flatten()] = held
        longer[place] = value
    return longer.unsqueeze(0).movedim((0, 1), (row_dim, dim))


@torch.library.register_fake("attngraph::with_earlier")  # type: ignore[untyped-decorator]
def _with_earlier_fake(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, place: Tensor, row_dim: int,
    dim: int, back: int,
) -> Tensor:  # fmt: skip
    shape = list(new.shape)
    shape[dim] = shape[dim] + first.shape[0] * back
    return new.new_empty(shape)


with_earlier = torch.ops.attngraph.with_earlier.default
refuse_derivatives("with_earlier", INSTEAD)
