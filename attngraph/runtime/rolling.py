"""Generation past the model's own context: a row that is full is computed anew from its last tokens.

What a loop with `model(ids[:, -n:])` computes. All positions shift with every token, so nothing that was
cached for a full row can be used: its window is a new prompt for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attngraph.runtime.generate import Advance
from attngraph.runtime.kv_cache import KVCache

Restart = Callable[[list[Tensor]], Tensor]
"""Takes prompts, `[T]` each; returns the logits of their last tokens, `[prompts, V]`."""


def rolling(
    advance: Advance, restart: Restart, state: KVCache, rows: Sequence[Tensor], limit: int
) -> Advance:
    """`advance` for rows that have room, and a restart from the last `limit` tokens for those that are full.

    Args:
        rows: the tokens of each row so far, `[T]`.
    """
    tokens_of = list(rows)

    def run(tokens: Tensor, counts: list[int]) -> Tensor:
        given = [row for row, count in enumerate(counts) if count]
        for row, token in zip(given, tokens, strict=True):
            tokens_of[row] = torch.cat([tokens_of[row], token.reshape(1)])[-limit:]
        full = [row for row in given if state.lengths[row] >= limit]
        open_rows = [row for row in given if row not in full]
        parts: dict[int, Tensor] = {}
        if open_rows:
            one = [int(row in open_rows) for row in range(len(counts))]
            kept = torch.tensor([row in open_rows for row in given], device=tokens.device)
            parts |= zip(open_rows, advance(tokens[kept], one), strict=True)
        if full:
            parts |= zip(full, restart([tokens_of[row] for row in full]), strict=True)
        return torch.stack([parts[row] for row in given])

    return run
