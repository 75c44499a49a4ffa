"""Self-attention in which some keys are masked: causal, masked, padded, windowed.

A mask is a predicate on (query i, key j). Scores where it does not hold become minus infinity, so
their weights are exactly zero:

    weights_ij = softmax_j(q_i . k_j / sqrt(D)  if visible(i, j)  else  -inf)

The softmax of a row that sees no key at all is NaN; no module here changes that.

    CausalSelfAttention     j <= i (Radford et al. 2019, GPT-2; Vaswani et al. 2017, section 3.2.3)
    MaskedSelfAttention     any boolean mask, True meaning "drop" or "keep" as configured
    PaddedSelfAttention     the padding mask [B, T] of a batch of sequences of unequal length
    SlidingWindowAttention  |i - j| <= w / 2 (Beltagy et al. 2020, Longformer, section 3.1), or
                            causal, i - w <= j <= i (Jiang et al. 2023, Mistral 7B, section 2)

Shapes: x `[B, T, C]` to `[B, T, C]`; scores `[B, H, T, T]`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attngraph.models.attention import (
    AttentionConfig,
    MultiHeadAttention,
    PackedMultiHeadAttention,
    merge_heads,
)


@dataclass(frozen=True)
class CausalAttentionConfig(AttentionConfig):
    """As AttentionConfig; `max_tokens` is the side of the stored triangle, at least T.

    `dropout` is applied to the attention weights and to the output (residual dropout).
    """

    max_tokens: int = 1024


class CausalAttention(nn.Module):
    """softmax(Q K^T / sqrt(D) with the future masked) V, no projections.

    query, key, value `[B, H, T, D]`, one floating dtype; result `[B, H, T, D]`.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = query.shape[-2]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
        return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ value


class CausalSelfAttention(PackedMultiHeadAttention):
    """The attention of a GPT block: each token sees itself and what came before.

    x `[B, T, C]` to `[B, T, C]`. Raises ValueError where T exceeds `max_tokens`.
    """

    triangle: Tensor

    def __init__(self, config: CausalAttentionConfig) -> None:
        super().__init__(config)
        self.residual_dropout = nn.Dropout(config.dropout)
        triangle = torch.tril(torch.ones(config.max_tokens, config.max_tokens))
        self.register_buffer("triangle", triangle, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        if tokens > self.triangle.shape[0]:
            raise ValueError(
                f"the input has {tokens} tokens, but the causal mask was built for "
                f"max_tokens={self.triangle.shape[0]}: configure a larger max_tokens"
            )
        query, key, value = self.heads_of(x)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        scores = scores.masked_fill(self.triangle[:tokens, :tokens] == 0, -math.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.residual_dropout(self.project(merge_heads(weights @ value)))
        return output


@dataclass(frozen=True)
class MaskedAttentionConfig(AttentionConfig):
    """As AttentionConfig; `true_means` is the mask's convention, `causal` adds j <= i to it."""

    true_means: Literal["drop", "keep"] = "drop"
    causal: bool = False


class MaskedSelfAttention(MultiHeadAttention):
    """Self-attention under a boolean mask: x `[B, T, C]` to `[B, T, C]`.

    `mask` is bool and broadcasts to `[B, H, T, T]` (query, key), so `[T, T]` is one mask for all;
    None masks nothing. Rows without any visible key are NaN.
    """

    def __init__(self, config: MaskedAttentionConfig) -> None:
        super().__init__(config)
        self.true_means = config.true_means
        self.causal = config.causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = x.shape[1]
        query, key, value = self.heads_of(x)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        if mask is not None:
            drop = mask if self.true_means == "drop" else ~mask
            scores = scores.masked_fill(drop, -math.inf)
        if self.causal:
            future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.project(merge_heads(weights @ value))
        return output


class PaddedSelfAttention(nn.Module):
    """Self-attention over a padded batch: every head and query gets the same row mask.

    x `[B, T, C]` to `[B, T, C]`; `padding` is bool `[B, T]` over keys, or None. With `true_means`
    "drop" it is True at padding, with "keep" True at real tokens.
    """

    def __init__(self, config: MaskedAttentionConfig) -> None:
        super().__init__()
        self.attention = MaskedSelfAttention(config)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = None if padding is None else padding[:, None, None, :]  # [B, 1, 1, T]
        output: Tensor = self.attention(x, mask)
        return output


@dataclass(frozen=True)
class SlidingWindowConfig(AttentionConfig):
    """As AttentionConfig; `window` is w: w // 2 keys to either side, or w behind if `causal`.

    The token itself is always seen and not counted, so a row holds at most w + 1 keys.
    """

    window: int = 512
    causal: bool = False


class SlidingWindowAttention(PackedMultiHeadAttention):
    """Self-attention to the neighbourhood of each token: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: SlidingWindowConfig) -> None:
        super().__init__(config)
        self.window = config.window
        self.causal = config.causal

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads_of(x)
        position = torch.arange(x.shape[1], device=x.device)
        behind = position[:, None] - position[None, :]  # [T, T], i - j
        visible = (behind >= 0) & (behind <= self.window) if self.causal else behind.abs() <= self.window // 2
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        scores = scores.masked_fill(~visible, -math.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.project(merge_heads(weights @ value))
        return output
