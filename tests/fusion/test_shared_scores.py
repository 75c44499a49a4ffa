"""Attentions that share weights or scores: joined where only the values differ, and told where one is left.

That they answer as eager does is tested with the spellings (`spellings/shared_scores.py`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import attngraph


def operands() -> tuple[Tensor, ...]:
    q, k, v, more = (
        torch.randn(2, 4, s, d, dtype=torch.float64) for s, d in ((7, 8), (9, 8), (9, 6), (9, 3))
    )
    return q, k, v, more


def test_values_weighed_by_one_softmax_are_joined() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        p = (q @ k.mT).softmax(-1)
        return p @ v, p @ more

    report = attngraph.explain(model, *operands())
    assert [entry.value_dim for entry in report.attention] == [9]
    assert not report.missed


def test_two_sums_under_one_dropout_lose_the_same_weights() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
        p = F.dropout((q @ k.mT).softmax(-1), 0.5)
        return p @ v - (p @ other)

    q, k, v, _ = operands()
    compiled = attngraph.compile(model)
    assert torch.equal(compiled(q, k, v, v.clone()), torch.zeros(2, 4, 7, 6, dtype=torch.float64))
    assert len(compiled.report.attention) == 1


def test_a_sum_that_is_left_keeps_its_weights_and_is_named() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        p = (q @ k.mT).softmax(-1)
        return p @ v, torch.einsum("bhij,bijc->bihc", p, pairs)

    q, k, v, _ = operands()
    report = attngraph.explain(model, q, k, v, torch.randn(2, 7, 9, 5, dtype=torch.float64))
    assert not report.attention
    (missed,) = report.missed
    assert "its weights are also used in another product (" in missed.reason
