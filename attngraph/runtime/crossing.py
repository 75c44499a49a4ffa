"""Generation across a branch on the number of tokens.

Where a row's length comes to the other side of a branch, the model computes all of its tokens in another way,
so what was kept of them is of no use. The tokens are known here, so the rows are prompts once more, for the
graph of the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attngraph.runtime.generate import Advance

Anew = Callable[[list[Tensor]], Tensor]
"""Takes all tokens of each row, `[T]` (none for rows that have ended); returns the logits of the last tokens
of those that have some."""


def crossing(
    advance: Advance, is_right: Callable[[list[int]], bool], anew: Anew, rows: Sequence[Tensor]
) -> Advance:
    """`advance` where its graph is right for so many new tokens of each row, and else all rows anew.

    Args:
        rows: the tokens of each row so far, `[T]`.
    """
    tokens_of = list(rows)

    def run(tokens: Tensor, counts: list[int]) -> Tensor:
        given = iter(torch.split(tokens, [n for n in counts if n]))
        for row, count in enumerate(counts):
            new = next(given) if count else tokens[:0]
            tokens_of[row] = torch.cat([tokens_of[row], new]) if count else new
        return advance(tokens, counts) if is_right(counts) else anew(tokens_of)

    return run
