"""The two factorised patterns of the Sparse Transformer (Child et al. 2019, section 4.3).

Each head sees about sqrt(T) of the keys, and two kinds of heads together reach all of the past in
two steps. With l the stride, for query i and key j <= i:

    "strided"  first kind   i - j <= l                       the previous l positions
               second kind  (i - j) mod l = 0                every l-th position back
    "fixed"    first kind   floor(j / l) = floor(i / l)      the same block of l positions
               second kind  j mod l >= l - c                 the last c positions of each block

Strided suits data with a period (rows of an image), fixed suits text. The kinds take turns: heads
0, 2, 4 ... are of the first kind and heads 1, 3, 5 ... of the second.

In the fixed pattern, a head of the second kind sees no key at all before the first position l - c.
Its output there is the sum of nothing, zero.

Shapes: x `[B, T, C]` to `[B, T, C]`; scores `[B, H, T, T]`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attngraph.models.attention import AttentionConfig, PackedMultiHeadAttention, merge_heads

SparsePattern = Literal["strided", "fixed"]


@dataclass(frozen=True)
class SparseAttentionConfig(AttentionConfig):
    """As AttentionConfig; `stride` is l, near sqrt(T), and `summary` is c, used by "fixed" only.

    Raises ValueError where the summary does not fit into the stride.
    """

    pattern: SparsePattern = "strided"
    stride: int = 128
    summary: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.summary <= self.stride:
            raise ValueError(
                f"summary {self.summary} must be from 1 to stride ({self.stride}): it is the number of "
                "positions of each block that later blocks can see"
            )


def sparse_pattern(tokens: int, config: SparseAttentionConfig, device: torch.device) -> Tensor:
    """Which keys each head sees: bool `[H, T, T]` (head, query, key)."""
    position = torch.arange(tokens, device=device)
    query, key = position[:, None], position[None, :]
    if config.pattern == "strided":
        first = query - key <= config.stride
        second = (query - key) % config.stride == 0
    else:
        first = key // config.stride == query // config.stride
        second = key % config.stride >= config.stride - config.summary
    head = torch.arange(config.heads, device=device)[:, None, None]  # [H, 1, 1]
    return torch.where(head % 2 == 0, first, second) & (key <= query)


class SparseAttention(PackedMultiHeadAttention):
    """Causal self-attention of alternating sparse patterns: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: SparseAttentionConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads_of(x)
        visible = sparse_pattern(x.shape[1], self.config, x.device)  # [H, T, T]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        scores = scores.masked_fill(~visible, -math.inf)
        weights = torch.softmax(scores, dim=-1).masked_fill(~visible, 0.0)  # rows without keys are zero
        output: Tensor = self.project(merge_heads(self.dropout(weights) @ value))
        return output
