"""Positions: how a model represents where a token stands.

Attention alone treats its tokens as a set. Position p enters in one of these ways:

    sinusoidal   sqrt(C) token[id] + PE[p],   PE(p, 2i) = sin(p / 10000^(2i/C)),
                 PE(p, 2i+1) = cos(p / 10000^(2i/C))      (Vaswani et al. 2017, section 3.5)
    learned      x + table[p], the table being trained    (Gehring et al. 2017, section 3.1)
    rotary       each pair (a, b) of coordinates of a query or key is turned by the angle
                 p * theta^(-2i/D), i the number of the pair:
                 (a, b) -> (a cos - b sin, a sin + b cos)  (Su et al. 2021, section 3.2.2)
    relative     a bias on the scores: the file `relative_bias`

Rotated scores depend on the difference of two positions only. There are two layouts of the pairs,
the same up to a permutation of the columns of W_Q and W_K:

    "interleaved"  pair i is (x[2i], x[2i+1]), as in the paper
    "half"         pair i is (x[i], x[i + D/2]), as in most checkpoints
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

RotaryLayout = Literal["interleaved", "half"]


def sinusoidal_table(tokens: int, width: int) -> Tensor:
    """Sines in the even columns and cosines in the odd ones: `[tokens, width]`, width even."""
    position = torch.arange(tokens)[:, None]
    angle = position / 10000 ** (torch.arange(0, width, 2) / width)  # [tokens, width / 2]
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class SinusoidalEmbedding(nn.Module):
    """Token embedding scaled by sqrt(C), plus the sinusoid: ids int64 `[B, T]` to `[B, T, C]`.

    Raises ValueError where T exceeds `max_tokens`.
    """

    table: Tensor

    def __init__(self, vocab_size: int, width: int, *, max_tokens: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        # Multiplied by sqrt(C) in forward, so that each coordinate has variance 1 there.
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.scale = math.sqrt(width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("table", sinusoidal_table(max_tokens, width), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        if tokens > self.table.shape[0]:
            raise ValueError(
                f"the input has {tokens} tokens, but the table of positions was built for "
                f"max_tokens={self.table.shape[0]}: configure a larger max_tokens"
            )
        embedded: Tensor = self.dropout(self.embedding(ids) * self.scale + self.table[:tokens])
        return embedded


class LearnedPositions(nn.Module):
    """Add a trained vector for each position: x `[B, T, C]` to `[B, T, C]`.

    Raises ValueError where T exceeds `max_tokens`.
    """

    def __init__(self, max_tokens: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_tokens, width))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        if tokens > self.table.shape[0]:
            raise ValueError(
                f"the input has {tokens} tokens, but there are learned positions for "
                f"max_tokens={self.table.shape[0]}: configure a larger max_tokens"
            )
        return x + self.table[:tokens]


def rotary_angles(positions: Tensor, width: int, base: float = 10000.0) -> Tensor:
    """The angle of each position and pair: positions `[T]`, floating, to `[T, width / 2]`."""
    pair = torch.arange(0, width, 2, device=positions.device, dtype=positions.dtype)  # 2i
    return positions[:, None] * base ** (-pair / width)


def rotate_interleaved(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (x[2i], x[2i+1]): x `[..., T, D]`, angles `[T, D / 2]`, to `[..., T, D]`."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]  # [..., T, D / 2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def rotate_half(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]): x `[..., T, D]`, angles `[T, D / 2]`, to `[..., T, D]`."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)  # [..., T, D / 2]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
