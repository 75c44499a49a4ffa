"""What is kept of every token, as a batch of sequences: for what reads earlier tokens and is no attention.

    attngraph::history(pages, new, table, starts, held, dim, as_long=None) -> [rows, positions, ...]

gives a stored value at every position of every row (`cached_attention.py` says how pages and rows lie); rows
shorter than the longest are padded with zeros.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import INSTEAD, numbers_of
from attngraph.ir.ops.transforms import refuse_derivatives

torch.library.define(
    "attngraph::history",
    "(Tensor pages, Tensor new, Tensor table, Tensor starts, Tensor held, int dim, Tensor? as_long=None) "
    "-> Tensor",
)


@torch.library.impl("attngraph::history", "CompositeExplicitAutograd")
def _history(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, held: Tensor, dim: int,
    as_long: Tensor | None = None,
) -> Tensor:  # fmt: skip
    begins, lengths = numbers_of(starts), numbers_of(held)
    page = pages.shape[dim]
    news = new.squeeze(0).movedim(dim - 1, 0)
    store = pages.movedim(dim, 1)
    counts = [b - a for a, b in itertools.pairwise(begins)]
    longest = max((h + n for h, n in zip(lengths, counts, strict=True)), default=0)
    found = news.new_zeros((len(counts), longest, *news.shape[1:]))
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        capacity = table.shape[1] * page
        positions = torch.arange(max(0, length - capacity), length, device=pages.device)
        slots = positions % capacity
        found[row, positions] = store[table[row, slots // page], slots % page]
        found[row, length : length + count] = news[begins[row] : begins[row] + count]
    return found.movedim(1, dim)


@torch.library.register_fake("attngraph::history")  # type: ignore[untyped-decorator]
def _history_fake(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, held: Tensor, dim: int,
    as_long: Tensor | None = None,
) -> Tensor:  # fmt: skip
    shape = list(new.shape)
    shape[0] = table.shape[0]
    longest: Any = torch.library.get_ctx().new_dynamic_size(min=2) if as_long is None else as_long.shape[0]
    shape[dim] = longest
    return new.new_empty(shape)


refuse_derivatives("history", INSTEAD)
