"""Keys that come in parts under one softmax: what one part may be, several may be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def with_one_maximum_subtracted(q, k, v, first_k, first_v):
    a, b = q @ first_k.mT, q @ k.mT
    top = torch.maximum(a.amax(-1, True), b.amax(-1, True))
    a, b = (a - top).exp(), (b - top).exp()
    total = a.sum(-1, True) + b.sum(-1, True)
    return (a / total) @ first_v + (b / total) @ v


def with_factors_of_their_own(q, k, v, first_k, first_v):
    n = first_k.shape[2]
    p = torch.cat([q @ first_k.mT, (2 * q) @ k.mT], -1).softmax(-1)
    return p[..., :n] @ first_v + p[..., n:] @ v


def of_keys_in_two_dimensions(q, k, v, first_k, first_v):
    n = first_k.shape[2]
    first_k, first_v = (x.unflatten(2, (-1, 2)) for x in (first_k, first_v))
    scores = torch.einsum("bhtd,bhxyd->bhtxy", q, first_k)
    p = torch.cat([scores.flatten(3), q @ k.mT], -1).softmax(-1)
    of_first = torch.einsum("bhtxy,bhxyd->bhtd", p[..., :n].unflatten(-1, (-1, 2)), first_v)
    return of_first + p[..., n:] @ v


def of_several_products(q, k, v, first_k, first_v):
    """Decoupled positions: a part of the width is multiplied apart."""
    n = first_k.shape[2]
    (q, r), (k, l), (first_k, first_l) = (x.split([5, 3], -1) for x in (q, k, first_k))
    p = torch.cat([q @ first_k.mT + r @ first_l.mT, q @ k.mT + r @ l.mT], -1).softmax(-1)
    return p[..., :n] @ first_v + p[..., n:] @ v


def of_different_queries(q, k, v, first_k, first_v):
    n = first_k.shape[2]
    p = torch.cat([q @ first_k.mT, q.tanh() @ k.mT], -1).softmax(-1)
    return p[..., :n] @ first_v + p[..., n:] @ v


def with_masks_of_their_own_and_a_sink(q, k, v, first_k, first_v):
    """Keys and masks are put together, and behind them stands a score without a value."""
    keys, values = torch.cat([first_k, k], 2), torch.cat([first_v, v], 2)
    t, n, m = torch.arange(q.shape[2])[:, None], torch.arange(first_k.shape[2]), torch.arange(k.shape[2])
    masks = torch.where(n <= t + 2, 0.0, -1e9), torch.where(m < t + 1, 0.0, -torch.inf)
    scores = q @ keys.mT + torch.cat([mask.expand(q.shape[0], 1, -1, -1) for mask in masks], -1)
    scores = torch.cat([scores, scores.new_ones(*q.shape[:3], 1)], -1)
    return (scores - scores.amax(-1, True)).softmax(-1)[..., :-1] @ values


@pytest.mark.parametrize(
    "function",
    [
        with_masks_of_their_own_and_a_sink,
        with_one_maximum_subtracted,
        with_factors_of_their_own,
        of_keys_in_two_dimensions,
        of_several_products,
        of_different_queries,
    ],
)
def test_parts_are_one_attention(function: Callable[..., Tensor], compare: Callable[..., Any]) -> None:
    compiled = attngraph.compile(function)
    keys = [normal(2, 4, 9, 8), normal(2, 4, 9, 8), normal(2, 4, 6, 8), normal(2, 4, 6, 8)]
    same = compare(function, compiled, (normal(2, 4, 7, 8), *keys))
    assert same, same.differences
    assert len(compiled.report.attention) == 1
    assert not compiled.report.missed
    assert "r0" not in compiled.report.attention[0].program
