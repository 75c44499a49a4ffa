"""Whole sequences cut into what a cache holds of each row, in pages out of order, and its new tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import Rows


class Paged:
    """Keys and values `[rows, heads, tokens, width]` over pages, of which nothing else is written but NaN.

    Args:
        lengths: for each row the tokens that are held and those that are new.
        page: tokens of a page.
        ring: how many tokens a row's pages hold, the latest ones; 0 for all.
        latent: values are the first columns of keys, and share their pages.
    """

    def __init__(
        self, k: Tensor, v: Tensor, lengths: Sequence[tuple[int, int]], page: int = 3, ring: int = 0,
        latent: bool = False,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(len(lengths) * 100 + page)
        self.lengths = lengths
        rows, heads, total, _ = k.shape
        columns = -(-(ring or total) // page)
        table = torch.randperm(rows * columns, generator=g).view(rows, columns)
        wholes = (k,) if latent else (k, v)
        made = [k.new_full((rows * columns, heads, page, w.shape[3]), torch.nan) for w in wholes]
        for row, (held, _) in enumerate(lengths):
            for p in range(max(0, held - columns * page), held):
                slot = p % (columns * page)
                for pages, whole in zip(made, wholes, strict=True):
                    pages[table[row, slot // page], :, slot % page] = whole[row, :, p]
        width = v.shape[3]
        self.pages = (made[0], made[0][..., :width] if latent else made[1])
        new = self.packed(k)
        self.new = (new, new[..., :width] if latent else self.packed(v))
        held = torch.tensor([h for h, _ in lengths])
        starts = torch.tensor([0, *[n for _, n in lengths]]).cumsum(0)
        self.rows = Rows(*(t.to(k.device) for t in (table, starts, held, held)))

    def packed(self, whole: Tensor) -> Tensor:
        """The new tokens of all rows side by side, `[1, heads, new, width]`."""
        return torch.cat([whole[r, :, h : h + n] for r, (h, n) in enumerate(self.lengths)], 1).unsqueeze(0)
