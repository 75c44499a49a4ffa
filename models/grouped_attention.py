"""Attention whose query heads share keys and values: multi-query and grouped-query.

Decoding reads every key and value once per step, so fewer of them is less to read. H query heads
share G key/value heads; query head h uses head h // (H / G):

    out_h = softmax(Q_h K_{h // R}^T / sqrt(D)) V_{h // R},   R = H / G

G = H is multi-head attention, G = 1 is multi-query attention (Shazeer 2019, "One Write-Head Is All
You Need", section 3), and what lies between is grouped-query attention (Ainslie et al. 2023,
section 2.2).

Codebases write the sharing in different ways. `GroupedQueryAttention` offers three of them, which
are the same function:

    "repeat_interleave"  K and V copied R times along the head axis
    "expand"             K and V given an axis of length R, then flattened into the heads
    "grouped"            the queries viewed as [B, G, R, T, D], so that K and V broadcast

Shapes: x `[B, T, C]` to `[B, T, C]`; queries `[B, H, T, D]`, keys `[B, G, T, D]`,
values `[B, G, T, Dv]`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attngraph.models.attention import AttentionConfig, merge_heads, split_heads

SharingSpelling = Literal["repeat_interleave", "expand", "grouped"]


@dataclass(frozen=True)
class MultiQueryConfig(AttentionConfig):
    """As AttentionConfig, with a `causal` mask unless told otherwise."""

    causal: bool = True


@dataclass(frozen=True)
class GroupedQueryConfig(MultiQueryConfig):
    """As MultiQueryConfig; `kv_heads` is G, a divisor of `heads`; `spelling` as in the module's docstring.

    Raises ValueError where `heads` is not a multiple of `kv_heads`.
    """

    kv_heads: int = 4
    spelling: SharingSpelling = "repeat_interleave"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads != 0:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly: "
                "heads must be a multiple of kv_heads"
            )


def hide_future(scores: Tensor) -> Tensor:
    """Set scores `[..., T, T]` (query, key) to minus infinity where the key comes later."""
    tokens = scores.shape[-1]
    past = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~past, -math.inf)


def attend_to_shared_heads(
    query: Tensor, key: Tensor, value: Tensor, *, spelling: SharingSpelling, causal: bool, dropout: nn.Dropout
) -> Tensor:
    """Scaled dot-product attention of H query heads over G key/value heads.

    query `[B, H, T, D]`, key `[B, G, T, D]`, value `[B, G, T, Dv]` to `[B, H, T, Dv]`.
    """
    batch, heads, tokens, width = query.shape
    groups, value_width = key.shape[1], value.shape[-1]
    repeats = heads // groups
    if spelling == "grouped":
        query = query.view(batch, groups, repeats, tokens, width)
        key, value = key.unsqueeze(2), value.unsqueeze(2)  # [B, G, 1, T, D or Dv]
    elif spelling == "expand":
        key = key[:, :, None].expand(-1, -1, repeats, -1, -1)  # [B, G, R, T, D]
        key = key.reshape(batch, heads, tokens, width)
        value = value[:, :, None].expand(-1, -1, repeats, -1, -1)
        value = value.reshape(batch, heads, tokens, value_width)
    else:
        key = key.repeat_interleave(repeats, dim=1)  # [B, H, T, D]
        value = value.repeat_interleave(repeats, dim=1)

    scores = query @ key.transpose(-2, -1) / math.sqrt(width)  # [B, H, T, T] or [B, G, R, T, T]
    if causal:
        scores = hide_future(scores)
    weights = dropout(torch.softmax(scores, dim=-1))
    mixed: Tensor = weights @ value
    return mixed.reshape(batch, heads, tokens, value_width)


class MultiQueryAttention(nn.Module):
    """H query heads over one key and one value head, by broadcasting.

    x `[B, T, C]` to `[B, T, C]`.
    """

    def __init__(self, config: MultiQueryConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.causal = config.causal
        self.query = nn.Linear(config.width, config.heads * config.key_width, bias=config.bias)
        self.key = nn.Linear(config.width, config.key_width, bias=config.bias)
        self.value = nn.Linear(config.width, config.value_width, bias=config.bias)
        self.project = nn.Linear(config.heads * config.value_width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        query = split_heads(self.query(x), self.heads)  # [B, H, T, D]
        key = self.key(x).unsqueeze(1)  # [B, 1, T, D]
        value = self.value(x).unsqueeze(1)  # [B, 1, T, Dv]

        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        if self.causal:
            scores = hide_future(scores)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.project(merge_heads(weights @ value))
        return output


class GroupedQueryAttention(nn.Module):
    """H query heads over G key/value heads: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: GroupedQueryConfig) -> None:
        super().__init__()
        self.config = config
        keys, values = config.kv_heads * config.key_width, config.kv_heads * config.value_width
        self.query = nn.Linear(config.width, config.heads * config.key_width, bias=config.bias)
        self.key = nn.Linear(config.width, keys, bias=config.bias)
        self.value = nn.Linear(config.width, values, bias=config.bias)
        self.project = nn.Linear(config.heads * config.value_width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        query = split_heads(self.query(x), self.config.heads)  # [B, H, T, D]
        key = split_heads(self.key(x), self.config.kv_heads)  # [B, G, T, D]
        value = split_heads(self.value(x), self.config.kv_heads)  # [B, G, T, Dv]
        mixed = attend_to_shared_heads(
            query, key, value, spelling=self.config.spelling, causal=self.config.causal, dropout=self.dropout
        )
        output: Tensor = self.project(merge_heads(mixed))
        return output
