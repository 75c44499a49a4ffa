"""Extended windows: some tokens see everything, or the window has gaps.

Both are from Longformer (Beltagy et al. 2020, section 3.1); the plain sliding window is in
`masked_attention`. For query i and key j of head h:

    GlobalWindowAttention   a local token sees its window and every global token,
                                |i - j| <= w / 2  or  j is global
                            and a global token sees all tokens, through projections of its own:
                                out_i = softmax(Qg_i Kg^T / sqrt(D)) Vg  if i is global
                                        softmax(Q_i K^T / sqrt(D), where visible) V  otherwise
    DilatedWindowAttention  the window has gaps, with a dilation d_h for each head:
                                |i - j| <= d_h w / 2  and  d_h divides i - j
                            or causal, 0 <= i - j <= d_h w  and  d_h divides i - j

Shapes: x `[B, T, C]` to `[B, T, C]`; scores `[B, H, T, T]`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attngraph.models.attention import AttentionConfig, merge_heads, split_heads
from attngraph.models.masked_attention import SlidingWindowAttention, SlidingWindowConfig


@dataclass(frozen=True)
class GlobalWindowConfig(AttentionConfig):
    """As AttentionConfig; `window` is w, so that w // 2 keys to either side are near."""

    window: int = 512


class GlobalWindowAttention(nn.Module):
    """A sliding window in which a few tokens see all tokens and are seen by all.

    x `[B, T, C]`, is_global bool `[B, T]` to `[B, T, C]`. `keep` is bool `[B, T]`, True at real
    tokens (None: all are real); the row of a padding token sees global tokens only, and is NaN in a
    sequence without any.
    """

    def __init__(self, config: GlobalWindowConfig) -> None:
        super().__init__()
        keys, values = config.heads * config.key_width, config.heads * config.value_width
        self.heads = config.heads
        self.window = config.window
        self.query = nn.Linear(config.width, keys, bias=config.bias)
        self.key = nn.Linear(config.width, keys, bias=config.bias)
        self.value = nn.Linear(config.width, values, bias=config.bias)
        self.global_query = nn.Linear(config.width, keys, bias=config.bias)
        self.global_key = nn.Linear(config.width, keys, bias=config.bias)
        self.global_value = nn.Linear(config.width, values, bias=config.bias)
        self.project = nn.Linear(values, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, is_global: Tensor, keep: Tensor | None = None) -> Tensor:
        query = split_heads(self.query(x), self.heads)  # [B, H, T, D]
        key = split_heads(self.key(x), self.heads)
        value = split_heads(self.value(x), self.heads)  # [B, H, T, Dv]
        position = torch.arange(x.shape[1], device=x.device)
        near = (position[:, None] - position[None, :]).abs() <= self.window // 2  # [T, T]
        visible = near | is_global[:, None, None, :]  # [B, 1, T, T]
        if keep is not None:
            visible = visible & keep[:, None, None, :]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        scores = scores.masked_fill(~visible, -math.inf)
        local = self.dropout(torch.softmax(scores, dim=-1)) @ value

        query = split_heads(self.global_query(x), self.heads)
        key = split_heads(self.global_key(x), self.heads)
        value = split_heads(self.global_value(x), self.heads)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, :], -math.inf)
        everywhere = self.dropout(torch.softmax(scores, dim=-1)) @ value

        mixed = torch.where(is_global[:, None, :, None], everywhere, local)  # [B, H, T, Dv]
        output: Tensor = self.project(merge_heads(mixed))
        return output


@dataclass(frozen=True)
class DilatedWindowConfig(SlidingWindowConfig):
    """As SlidingWindowConfig; `dilations` has the gap d of each head, 1 being no gap.

    The window still holds at most `window` keys besides the token itself, further apart.
    Raises ValueError where there is not one dilation of at least 1 for each head.
    """

    dilations: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4)

    def __post_init__(self) -> None:
        if len(self.dilations) != self.heads or min(self.dilations, default=0) < 1:
            raise ValueError(
                f"dilations {self.dilations} must have one number, at least 1, for each of the "
                f"{self.heads} heads"
            )


class DilatedWindowAttention(SlidingWindowAttention):
    """Self-attention to every d-th neighbour, d by head: x `[B, T, C]` to `[B, T, C]`."""

    dilations: Tensor

    def __init__(self, config: DilatedWindowConfig) -> None:
        super().__init__(config)
        self.register_buffer("dilations", torch.tensor(config.dilations), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads_of(x)
        position = torch.arange(x.shape[1], device=x.device)
        behind = position[:, None] - position[None, :]  # [T, T], i - j
        gap = self.dilations[:, None, None]  # [H, 1, 1]
        if self.causal:
            near = (behind >= 0) & (behind <= gap * self.window)  # [H, T, T]
        else:
            near = behind.abs() <= gap * (self.window // 2)
        visible = near & (behind % gap == 0)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        scores = scores.masked_fill(~visible, -math.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.project(merge_heads(weights @ value))
        return output
