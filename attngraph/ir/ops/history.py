"""What a step of a decoder reads of earlier tokens beside attention: all of them, or the last few.

`cached_attention.py` says how pages and rows lie. `history` gives a stored value at every position of every
row, as a batch; rows shorter than the longest are padded with zeros. Of a value that has an entry for each
`size` tokens (`meaning/tokens/streams.py`), it gives the entries. `with_earlier` puts the `back` tokens
before every row's new tokens in front of them, and zeros where the row begins, so a token's window never
reaches into another row; `place` says where each new token stands then. By `last_tokens`, `[N, back + 1,
...]`, each new token has a window of its own, itself last: what is computed from a window is computed from
each token alone.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import Rows, counts, numbers_of
from attngraph.ir.ops.declare import INSTEAD, declare


def _shape(a: Any) -> Tensor:
    shape: list[Any] = [a.table.shape[0], *a.new.shape[1:]]
    longest = torch.library.get_ctx().new_dynamic_size
    shape[a.dim] = longest(min=2) if a.as_long is None else a.as_long.shape[0]
    return a.new.new_empty(shape)  # type: ignore[no-any-return]


@declare(fake=_shape, derivatives=INSTEAD)
def history(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, held: Tensor, dim: int,
    as_long: Tensor | None = None, size: int = 1,
) -> Tensor:  # fmt: skip
    page = pages.shape[dim]
    news, store = new.squeeze(0).movedim(dim - 1, 0), pages.movedim(dim, 1)
    spans, before = list(itertools.pairwise(numbers_of(starts))), numbers_of(held)
    lengths = [n // size for n in before]
    fresh = [slice(a + size - 1 - n % size, b, size) for (a, b), n in zip(spans, before, strict=True)]
    longest = max(((n + b - a) // size for (a, b), n in zip(spans, before, strict=True)), default=0)
    found = news.new_zeros((len(spans), longest, *news.shape[1:]))
    for row, (length, places) in enumerate(zip(lengths, fresh, strict=True)):
        capacity = table.shape[1] * page
        positions = torch.arange(max(0, length - capacity), length, device=pages.device)
        slots = positions % capacity
        found[row, positions] = store[table[row, slots // page], slots % page].to(found.dtype)
        added = news[places]
        found[row, length : length + len(added)] = added
    return found.movedim(1, dim)


def _longer_shape(a: Any) -> Tensor:
    shape = list(a.new.shape)
    shape[a.dim] = shape[a.dim] + a.first.shape[0] * a.back
    return a.new.new_empty(shape)  # type: ignore[no-any-return]


@declare(fake=_longer_shape, derivatives=INSTEAD)
def with_earlier(
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


def _windows_shape(a: Any) -> Tensor:
    rank = a.new.ndim
    shape = [n for d, n in enumerate(a.new.shape) if d not in (a.row_dim % rank, a.dim % rank)]
    return a.new.new_empty((a.new.shape[a.dim], a.back + 1, *shape))  # type: ignore[no-any-return]


@declare(fake=_windows_shape, derivatives=INSTEAD)
def last_tokens(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, place: Tensor, row_dim: int,
    dim: int, back: int,
) -> Tensor:  # fmt: skip
    longer = with_earlier(pages, new, table, starts, first, place, row_dim, dim, back)
    value = longer.movedim((row_dim, dim), (0, 1))[0]
    found: Tensor = value[place.unsqueeze(1) + torch.arange(-back, 1, device=place.device)]
    return found
