"""The last few tokens of each new token of a decoder's step: what a window over tokens reads, token by token.

    attngraph::last_tokens(pages, new, table, starts, first, place, row_dim, dim, back) -> windows

The operands are those of `attngraph::with_earlier`, whose result has each row's tokens in order. Here each
new token has a window of its own: `windows` is `[N, back + 1, ...]`, the token itself last, zeros before the
row's first. So what is computed from a window is computed from each token alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import INSTEAD
from attngraph.ir.ops.transforms import refuse_derivatives
from attngraph.ir.ops.with_earlier import with_earlier


class Runner(Protocol):
    """Collects windows; returns None for a call that it does not support."""

    def run(
        self, pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, row_dim: int,
        dim: int, back: int,
    ) -> Tensor | None: ...  # fmt: skip


RUNNERS: list[Runner] = []
"""In order of preference; plain PyTorch serves what none supports."""

torch.library.define(
    "attngraph::last_tokens",
    "(Tensor pages, Tensor new, Tensor table, Tensor starts, Tensor first, Tensor place, int row_dim, "
    "int dim, int back) -> Tensor",
)


@torch.library.impl("attngraph::last_tokens", "CompositeExplicitAutograd")
def _last_tokens(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, place: Tensor, row_dim: int,
    dim: int, back: int,
) -> Tensor:  # fmt: skip
    for runner in RUNNERS:
        made = runner.run(pages, new, table, starts, first, row_dim, dim, back)
        if made is not None:
            return made
    longer = with_earlier(pages, new, table, starts, first, place, row_dim, dim, back)
    value = longer.movedim((row_dim, dim), (0, 1))[0]
    found: Tensor = value[place.unsqueeze(1) + torch.arange(-back, 1, device=place.device)]
    return found


@torch.library.register_fake("attngraph::last_tokens")  # type: ignore[untyped-decorator]
def _last_tokens_fake(
    pages: Tensor, new: Tensor, table: Tensor, starts: Tensor, first: Tensor, place: Tensor, row_dim: int,
    dim: int, back: int,
) -> Tensor:  # fmt: skip
    shape = [n for d, n in enumerate(new.shape) if d not in (row_dim % new.ndim, dim % new.ndim)]
    return new.new_empty((new.shape[dim], back + 1, *shape))


last_tokens = torch.ops.attngraph.last_tokens.default
refuse_derivatives("last_tokens", INSTEAD)
