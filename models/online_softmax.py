"""Softmax and attention in one pass over the keys, as a loop.

The softmax of a row needs its maximum, then its sum, then a third pass. The online form keeps a
running maximum m, sum d and output o, and rescales d and o when the maximum grows
(Milakov & Gimelshein 2018, algorithm 3; with the output, Rabe & Staats 2021, section 2):

    m_i = max(m_{i-1}, x_i)
    d_i = d_{i-1} e^(m_{i-1} - m_i) + e^(x_i - m_i)
    o_i = o_{i-1} (d_{i-1} / d_i) e^(m_{i-1} - m_i) + e^(x_i - m_i) v_i / d_i

so that after i keys o_i is the attention over those i keys. Flash attention takes the keys a block
at a time and divides once at the end (Dao 2023, FlashAttention-2, algorithm 1):

    m' = max(m, rowmax S);   P = e^(S - m')
    d' = d e^(m - m') + rowsum P;   o' = o e^(m - m') + P V_block;   out = o / d

Shapes: queries `[..., Sq, D]`, keys `[..., Skv, D]`, values `[..., Skv, Dv]` to `[..., Sq, Dv]`.
The loops are Python's: a trace of them holds one copy of the body for each key or block.
"""

import math

import torch
from torch import Tensor, nn


class OnlineSoftmaxAttention(nn.Module):
    """One key after another: the outputs over every prefix of the keys.

    scores `[..., Sq, Skv]` and values `[..., Skv, Dv]` to `[..., Skv, Sq, Dv]`, whose entry i is
    softmax(scores of keys 0 .. i) V.
    """

    def forward(self, scores: Tensor, values: Tensor) -> Tensor:
        largest = torch.full_like(scores[..., :1], -math.inf)  # [..., Sq, 1]
        total = torch.zeros_like(largest)
        output = torch.zeros_like(scores[..., :1] * values[..., :1, :])  # [..., Sq, Dv]
        prefixes = []
        for i in range(scores.shape[-1]):
            score, value = scores[..., i : i + 1], values[..., i : i + 1, :]  # [..., Sq or 1, 1 or Dv]
            new_largest = torch.maximum(largest, score)
            shrink, weight = torch.exp(largest - new_largest), torch.exp(score - new_largest)
            new_total = total * shrink + weight
            output = output * (total / new_total) * shrink + weight * value / new_total
            largest, total = new_largest, new_total
            prefixes.append(output)
        return torch.stack(prefixes, dim=-3)


class FlashAttention(nn.Module):
    """Scaled dot-product attention by blocks of `block` keys; no `[Sq, Skv]` matrix is made.

    With `causal`, Sq = Skv and query i sees keys j <= i.
    """

    def __init__(self, block: int = 64, *, causal: bool = False) -> None:
        super().__init__()
        self.block = block
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        row = torch.arange(query.shape[-2], device=query.device)[:, None]  # [Sq, 1]
        largest = torch.full_like(query[..., :1], -math.inf)  # [..., Sq, 1]
        total = torch.zeros_like(largest)
        output = torch.zeros_like(query[..., :1] * value[..., :1, :])  # [..., Sq, Dv]
        for start in range(0, key.shape[-2], self.block):
            keys, values = (part[..., start : start + self.block, :] for part in (key, value))
            scores = query @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])  # [..., Sq, block]
            if self.causal:
                column = start + torch.arange(keys.shape[-2], device=query.device)
                scores = scores.masked_fill(column > row, -math.inf)
            new_largest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
            shrink, weights = torch.exp(largest - new_largest), torch.exp(scores - new_largest)
            total = total * shrink + weights.sum(dim=-1, keepdim=True)
            output = output * shrink + weights @ values
            largest = new_largest
        return output / total
