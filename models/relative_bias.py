"""Relative positions as a bias on the scores.

    scores_ij = scale * q_i . k_j + bias[h, i, j],   bias a function of j - i only

    "t5"     a trained number for each head and bucket of distances: half of the buckets hold one
             distance each, the others grow geometrically up to `max_distance`, and all further
             keys share the last; causal attention has offsets of one sign; otherwise each sign
             has half of the buckets (Raffel et al. 2020, section 2.1). The scores are
             not scaled.
    "alibi"  slope_h * (j - i), with slope_h = 2^(-8 (h + 1) / H), the heads counted from 0
             (Press et al. 2022, section 3; their code has other slopes where H is no power of 2)
    "swin"   tokens are an M x M window of an image, row by row, and each of the (2M - 1)^2
             offsets has a trained number for each head (Liu et al. 2021, section 3.2, equation 4)

Shapes: x `[B, T, C]` to `[B, T, C]`; biases `[H, T, T]` (head, query, key).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attngraph.models.attention import AttentionConfig, MultiHeadAttention, merge_heads
from attngraph.models.grouped_attention import hide_future


def t5_buckets(offset: Tensor, *, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """The bucket of each offset j - i: int64 of any shape to int64 of the same, 0 to buckets - 1."""
    first = torch.zeros_like(offset)
    if causal:
        distance = (-offset).clamp(min=0)
    else:
        buckets //= 2
        first = (offset > 0).long() * buckets
        distance = offset.abs()
    exact = buckets // 2  # distances 0 to exact - 1 have a bucket each
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def offsets(tokens: int, device: torch.device) -> Tensor:
    """j - i for each query i and key j: int64 `[T, T]`."""
    position = torch.arange(tokens, device=device)
    return position[None, :] - position[:, None]


class T5Bias(nn.Module):
    """A trained number for each head and bucket of distances: T to `[H, T, T]`."""

    def __init__(self, heads: int, *, buckets: int, max_distance: int, causal: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.table = nn.Embedding(buckets, heads)

    def forward(self, tokens: int) -> Tensor:
        bucket = t5_buckets(
            offsets(tokens, self.table.weight.device),
            buckets=self.buckets,
            max_distance=self.max_distance,
            causal=self.causal,
        )
        bias: Tensor = self.table(bucket).permute(2, 0, 1)
        return bias


class ALiBi(nn.Module):
    """A slope for each head, times the offset: T to `[H, T, T]`; nothing is trained."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, tokens: int) -> Tensor:
        return self.slopes[:, None, None] * offsets(tokens, self.slopes.device)


class WindowBias(nn.Module):
    """A trained number for each head and 2D offset: T = M * M to `[H, T, T]`.

    Raises ValueError where T is not M * M.
    """

    index: Tensor

    def __init__(self, heads: int, side: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        place = torch.arange(side * side)
        row, column = place // side, place % side
        rows = row[:, None] - row[None, :] + side - 1  # [T, T], 0 to 2M - 2
        columns = column[:, None] - column[None, :] + side - 1
        self.register_buffer("index", rows * (2 * side - 1) + columns, persistent=False)

    def forward(self, tokens: int) -> Tensor:
        if tokens != self.index.shape[0]:
            raise ValueError(
                f"the input has {tokens} tokens, but a window has {self.index.shape[0]}: configure "
                "another side"
            )
        return self.table[self.index].permute(2, 0, 1)


@dataclass(frozen=True)
class RelativeBiasConfig(AttentionConfig):
    """As AttentionConfig; `bias_kind` is one of the three above, with the settings it needs.

    `buckets` and `max_distance` are for "t5", `side` is M of "swin"; `causal` adds j <= i.
    """

    bias_kind: Literal["t5", "alibi", "swin"] = "t5"
    causal: bool = False
    buckets: int = 32
    max_distance: int = 128
    side: int = 7

    def relative_bias(self) -> nn.Module:
        """A new bias module of this kind."""
        if self.bias_kind == "t5":
            return T5Bias(
                self.heads, buckets=self.buckets, max_distance=self.max_distance, causal=self.causal
            )
        return ALiBi(self.heads) if self.bias_kind == "alibi" else WindowBias(self.heads, self.side)


class RelativeBiasAttention(MultiHeadAttention):
    """Self-attention with a relative bias: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: RelativeBiasConfig) -> None:
        super().__init__(config)
        self.causal = config.causal
        self.scale = 1.0 if config.bias_kind == "t5" else 1 / math.sqrt(config.key_width)
        self.relative_bias = config.relative_bias()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads_of(x)
        scores = query @ key.transpose(-2, -1) * self.scale  # [B, H, T, T]
        scores = scores + self.relative_bias(x.shape[1])
        if self.causal:
            scores = hide_future(scores)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.project(merge_heads(weights @ value))
        return output
