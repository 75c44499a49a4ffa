"""How a token is drawn from logits: temperature first, then top-k, then top-p among the remaining tokens,
then min-p, in the order of transformers. Rows are sampled together, each with its own options (requests have
their own)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.runtime.generation_options import Options


def choose(logits: Tensor, options: Sequence[Options], drawn: Sequence[float]) -> Tensor:
    """One token for each row of the logits `[R, V]`, by its options and a random number in [0, 1)."""
    if all(o.temperature == 0 for o in options):
        return logits.argmax(-1)

    def each(values: Sequence[Any], unlimited: Any) -> Tensor | None:
        limited = any(v is not None for v in values)
        given = [unlimited if v is None else v for v in values]
        return torch.tensor(given, device=logits.device) if limited else None

    temperature = torch.tensor([o.temperature for o in options], device=logits.device)
    top_k, top_p = each([o.top_k for o in options], 0), each([o.top_p for o in options], 1.0)
    uniform = torch.tensor(drawn, dtype=torch.float64, device=logits.device)
    return sample(logits, temperature, top_k, top_p, uniform, each([o.min_p for o in options], 0.0))


def generator_of(options: Options) -> torch.Generator:
    """Draws the random numbers of a row, or of rows that have them together."""
    generator = torch.Generator()
    if options.seed is None:
        generator.seed()
    else:
        generator.manual_seed(options.seed)
    return generator


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    uniform: Tensor, min_p: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One token for each row.

    Args:
        logits: `[R, V]`.
        temperature: `[R]`; 0 takes the most likely token.
        top_k: int64 `[R]`, 0 for no limit; None: no limit for any row. top_p: `[R]`, 1 for no limit; or None.
        uniform: `[R]` numbers in [0, 1), by which the token is drawn.
        min_p: `[R]`; leaves out tokens whose probability is below min_p times the largest; or None.

    Returns:
        int64 `[R]`.
    """
    count = logits.shape[-1]
    for most in (min(LIKELY, count), count):
        weights, order, total = kept_weights(logits, temperature, top_k, top_p, min_p, most)
        sums = weights.cumsum(-1)
        drawn = uniform.double() * torch.where(temperature > 0, total, 0.0)
        if most == count or bool((drawn < sums[:, -1]).all()):
            break
    place = torch.searchsorted(sums, drawn.unsqueeze(1), right=True).clamp_max(most - 1)
    rank = torch.arange(most, device=weights.device)
    last = (weights > 0).long().mul(rank).amax(-1, keepdim=True)  # so that rounding picks no excluded token
    sampled = order.gather(1, torch.minimum(place, last)).squeeze(1)
    return torch.where(temperature > 0, sampled, logits.argmax(-1))


LIKELY = 1024
"""How many of the likeliest tokens are looked at first: the token that is drawn is nearly always one of them,
and to sort all of them takes a good part of a token's time."""


def kept_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    min_p: Tensor | None = None, most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The probabilities of the `most` likeliest tokens (None: of all), `[R, most]`, from the largest down,
    zero for those left out; which token each belongs to; and the sum for all tokens that are not left out,
    `[R]`, NaN where it needs more tokens."""
    count = logits.shape[-1]
    most = count if most is None else most
    scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0).double().unsqueeze(1)
    values, order = _largest(scaled, most)
    rank = torch.arange(most, device=values.device)
    weights = (values - scaled.logsumexp(-1, keepdim=True)).exp()
    of_all = torch.ones_like(weights[:, 0])  # the sum over tokens here and elsewhere, NaN if it is not known
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, count).unsqueeze(1)
        weights = weights.masked_fill(rank >= limit, 0.0)
        known = torch.where(limit[:, 0] <= most, weights.sum(-1), math.nan)
        of_all = torch.where(limit[:, 0] < count, known, of_all)
    ends = weights[:, -1] == 0 if most < count else torch.ones_like(weights[:, 0], dtype=torch.bool)
    if top_p is not None:
        part = top_p.double().unsqueeze(1) * of_all.unsqueeze(1)
        before = weights.cumsum(-1) - weights
        left_out = (before >= part) & (rank > 0) & (top_p < 1).unsqueeze(1)
        weights = weights.masked_fill(left_out, 0.0)
        ends, of_all = _cut(weights, left_out, ends, of_all, top_p < 1)
    if min_p is not None:
        left_out = weights < min_p.double().unsqueeze(1) * weights[:, :1]
        weights = weights.masked_fill(left_out, 0.0)
        ends, of_all = _cut(weights, left_out, ends, of_all, torch.ones_like(ends))
    return weights, order, of_all


def _cut(
    weights: Tensor, left_out: Tensor, ends: Tensor, of_all: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether all tokens that are not left out are here, and their sum, after `rows` have left out some."""
    ends = ends | (left_out[:, -1] & rows)
    return ends, torch.where(rows, torch.where(ends, weights.sum(-1), math.nan), of_all)


def _largest(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """So many of the values of each row from the largest down, equal ones in order, and their places."""
    if most < values.shape[-1]:
        found, order = values.topk(most + 1)
        if not bool((found[:, -2] == found[:, -1]).any()):  # else it is not known which of them is next
            order = order[:, :most].sort(dim=-1).values
            found, places = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
            return found, order.gather(1, places)
    found, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return found[:, :most], order[:, :most]
