"""Attention to some of the keys, with what is needed to merge it with attention to the others.

Each part has its result and the log-sum-exp of its scores; together they are the parts weighted by their
shares of the sum of all exponentials. Blocks of a latent's cache (`latent_attention.py`) and ranks that
divide the tokens of a cache (`divided_attention.py`) merge by this.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops import kernels


class Part(NamedTuple):
    """Attention of some queries to a part of their keys. `lse` is minus infinity for a query that sees no key
    of the part; `is_clear` is False if a NaN in `lse` may instead come from NaN scores."""

    out: Tensor
    lse: Tensor
    is_clear: bool = True


def cleared(out: Tensor, lse: Tensor, operands: Sequence[Tensor]) -> Part:
    """A kernel's results as a part: where its log-sum-exp is NaN because no key is seen, it is minus
    infinity."""
    hidden = lse.isnan()
    if not bool(hidden.any()) or all(map(_is_a_number, operands)):
        return Part(out, lse.masked_fill(hidden, -math.inf))
    return Part(out, lse, False)


def _is_a_number(tensor: Tensor) -> bool:
    """Whether no element can make a score NaN: no NaN and no +inf (masks contain -inf)."""
    return not tensor.is_floating_point() or bool((tensor < math.inf).all())


def tell_shares(parts: Sequence[Part]) -> bool:
    """Whether the log-sum-exps are precise enough to weight the parts: not for a row whose scores are all
    far from zero, such as one masked everywhere with a finite fill."""
    top = torch.stack([part.lse for part in parts]).amax(0).abs()
    return not bool(((top > kernels.TRUSTED) & top.isfinite()).any())


def joined(parts: Sequence[Part]) -> Part:
    """The parts merged, each weighted by its share of the normaliser. A row that sees no key in any part is
    NaN."""
    lse = torch.stack([part.lse for part in parts])
    outs = torch.stack([part.out for part in parts])
    weights = torch.softmax(lse, 0).to(outs.dtype)
    out = torch.where((lse > -math.inf)[..., None], outs, 0.0).mul(weights[..., None]).sum(0)
    return Part(out, lse.logsumexp(0))


def can_be_joined(program: ScoreProgram) -> bool:
    """Whether attention to blocks of keys can be merged afterwards: a sink would be counted once per block,
    and changes to the weights apply to weights normalised over all keys."""
    return program.sink is None and not program.changes_weights
