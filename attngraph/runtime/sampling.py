"""Samples the next token of every row at once: greedy, temperature, top-k, top-p, min-p.

Each row may have its own parameters, so rows of different requests are sampled together. The order is that of
transformers: temperature first, then top-k, then top-p among the remaining tokens, then min-p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    uniform: Tensor | None, min_p: float | None = None,
) -> Tensor:  # fmt: skip
    """One token for each row.

    Args:
        logits: `[R, V]`.
        temperature: `[R]`; 0 takes the most likely token.
        top_k: int64 `[R]`, 0 for no limit; None: no limit for any row. top_p: `[R]`, 1 for no limit; or None.
        uniform: `[R]` numbers in [0, 1), by which the token is drawn; None where all rows are greedy.
        min_p: leaves out tokens whose probability is below min_p times the largest.

    Returns:
        int64 `[R]`.
    """
    greedy = logits.argmax(-1)
    if uniform is None or not bool((temperature > 0).any()):
        return greedy
    weights, order = kept_weights(logits, temperature, top_k, top_p, min_p)
    rank = torch.arange(weights.shape[1], device=weights.device)
    total = weights.cumsum(-1)
    drawn = (uniform.double() * total[:, -1]).unsqueeze(1)
    place = torch.searchsorted(total, drawn, right=True).clamp_max(weights.shape[1] - 1)
    last = (weights > 0).long().mul(rank).amax(-1, keepdim=True)  # so that rounding picks no excluded token
    sampled = order.gather(1, torch.minimum(place, last)).squeeze(1)
    return torch.where(temperature > 0, sampled, greedy)


def kept_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    min_p: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The probabilities of tokens, `[R, V]`, from the largest down, zero for those left out and not
    normalised; and which token each belongs to."""
    scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0).double().unsqueeze(1)
    values, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, values.shape[1]).unsqueeze(1)
        values = values.masked_fill(rank >= limit, -math.inf)
    weights = values.softmax(-1)
    if top_p is not None:
        before = weights.cumsum(-1) - weights
        weights = weights.masked_fill((before >= top_p.double().unsqueeze(1)) & (rank > 0), 0.0)
    if min_p is not None:
        weights = weights.masked_fill(weights < min_p * weights[:, :1], 0.0)
    return weights, order
