"""Attention without masks: from one query to multi-head self- and cross-attention.

Every module computes, for each query q and its keys k_j and values v_j,

    out = sum_j softmax_j(score(q, k_j)) v_j

and differs in where q, k and v come from:

    DotProductAttention        one vector q, score = q . k_j
    Seq2SeqAttention           q a decoder state, k = v = the encoder states
                               (Luong et al. 2015, section 3.1, score "dot")
    ScaledDotProductAttention  softmax(Q K^T / sqrt(D)) V
                               (Vaswani et al. 2017, equation 1)
    MultiHeadAttention         head_h = Attention(x W_Q^h, x W_K^h, x W_V^h),
                               out = concat(head_1 ... head_H) W_O  (ibid., section 3.2.2)
    PackedMultiHeadAttention   the same, with W_Q, W_K and W_V stored as one matrix
    HeadByHeadAttention        the same, with each head a module of its own
    CrossAttention             the same, with keys and values from another sequence

Shapes: x `[B, T, C]`; inside, queries and keys are `[B, H, T, D]` and values `[B, H, T, Dv]`,
where Dv need not equal D. Masked and grouped forms are in the two files beside this one.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of one multi-head attention; the defaults are those of GPT-2 small.

    `width` is C, `key_width` is D and `value_width` is Dv (both of one head), `dropout` is the
    rate applied to the attention weights in training, `bias` is for every projection.
    """

    width: int = 768
    heads: int = 12
    key_width: int = 64
    value_width: int = 64
    dropout: float = 0.0
    bias: bool = True

    @classmethod
    def of_width(cls, width: int, heads: int, **others: Any) -> Self:
        """Heads that share the width evenly; `others` are the fields that follow."""
        return cls(width, heads, width // heads, width // heads, **others)


def require_multiple(width: int, heads: int) -> None:
    """Raise ValueError where the heads do not divide the width."""
    if width % heads != 0:
        raise ValueError(
            f"width {width} cannot be shared evenly by {heads} heads: width must be a multiple of heads"
        )


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Cut the last axis into heads: `[B, T, H * D]` to `[B, H, T, D]`, as a view."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Put the heads side by side again: `[B, H, T, D]` to `[B, T, H * D]`."""
    batch, heads, tokens, width = x.shape
    return x.transpose(1, 2).contiguous().view(batch, tokens, heads * width)


class DotProductAttention(nn.Module):
    """One vector query against m keys, unscaled: q `[D]`, K `[m, D]`, V `[m, Dv]` to `[Dv]`."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = keys @ query  # [m]
        weights = torch.softmax(scores, dim=0)
        return weights @ values


class Seq2SeqAttention(nn.Module):
    """A decoder state looks back at the encoder states, which are both keys and values.

    state `[B, D]`, encoder_states `[B, S, D]` to context `[B, D]`.
    """

    def forward(self, state: Tensor, encoder_states: Tensor) -> Tensor:
        scores = torch.bmm(encoder_states, state.unsqueeze(2)).squeeze(2)  # [B, S]
        weights = torch.softmax(scores, dim=1)
        return torch.bmm(weights.unsqueeze(1), encoder_states).squeeze(1)


class ScaledDotProductAttention(nn.Module):
    """softmax(Q K^T / sqrt(D)) V: Q `[..., Sq, D]`, K `[..., Skv, D]`, V `[..., Skv, Dv]`.

    Returns `[..., Sq, Dv]`. The division keeps the variance of scores independent of D.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = torch.softmax(scores, dim=-1)
        return weights @ value


class MultiHeadAttention(nn.Module):
    """Self-attention with three separate projections: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        keys, values = config.heads * config.key_width, config.heads * config.value_width
        self.heads = config.heads
        self.query = nn.Linear(config.width, keys, bias=config.bias)
        self.key = nn.Linear(config.width, keys, bias=config.bias)
        self.value = nn.Linear(config.width, values, bias=config.bias)
        self.project = nn.Linear(values, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys `[B, H, T, D]`, values `[B, H, T, Dv]`."""
        query, key, value = (split_heads(f(x), self.heads) for f in (self.query, self.key, self.value))
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads_of(x)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.project(merge_heads(weights @ value))
        return output


class PackedMultiHeadAttention(nn.Module):
    """Self-attention with one projection to `[Q | K | V]`: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        keys, values = config.heads * config.key_width, config.heads * config.value_width
        self.heads = config.heads
        self.parts = (keys, keys, values)
        self.qkv = nn.Linear(config.width, sum(self.parts), bias=config.bias)
        self.project = nn.Linear(values, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys `[B, H, T, D]`, values `[B, H, T, Dv]`."""
        query, key, value = (split_heads(part, self.heads) for part in self.qkv(x).split(self.parts, dim=-1))
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads_of(x)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, T, T]
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.project(merge_heads(weights @ value))
        return output


class AttentionHead(nn.Module):
    """One head with its own small projections: x `[B, T, C]` to `[B, T, Dv]`."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.query = nn.Linear(config.width, config.key_width, bias=config.bias)
        self.key = nn.Linear(config.width, config.key_width, bias=config.bias)
        self.value = nn.Linear(config.width, config.value_width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)  # [B, T, D or Dv]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, T, T]
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = weights @ value
        return output


class HeadByHeadAttention(nn.Module):
    """Self-attention as a list of single heads, concatenated: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.heads = nn.ModuleList([AttentionHead(config) for _ in range(config.heads)])
        self.project = nn.Linear(config.heads * config.value_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.project(torch.cat([head(x) for head in self.heads], dim=-1))
        return output


@dataclass(frozen=True)
class CrossAttentionConfig(AttentionConfig):
    """As AttentionConfig; `memory_width` is the width of the sequence that is attended to."""

    memory_width: int = 768


class CrossAttention(nn.Module):
    """Queries from x, keys and values from memory (an encoder's output, another modality).

    x `[B, Sq, C]`, memory `[B, Skv, memory_width]` to `[B, Sq, C]`. `padding` is bool `[B, Skv]`,
    True where a token of the memory is padding and must not be seen.
    """

    def __init__(self, config: CrossAttentionConfig) -> None:
        super().__init__()
        keys, values = config.heads * config.key_width, config.heads * config.value_width
        self.heads = config.heads
        self.query = nn.Linear(config.width, keys, bias=config.bias)
        self.key = nn.Linear(config.memory_width, keys, bias=config.bias)
        self.value = nn.Linear(config.memory_width, values, bias=config.bias)
        self.project = nn.Linear(values, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor | None = None) -> Tensor:
        query = split_heads(self.query(x), self.heads)  # [B, H, Sq, D]
        key = split_heads(self.key(memory), self.heads)  # [B, H, Skv, D]
        value = split_heads(self.value(memory), self.heads)  # [B, H, Skv, Dv]

        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [B, H, Sq, Skv]
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None, :], -math.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        output: Tensor = self.project(merge_heads(weights @ value))
        return output
