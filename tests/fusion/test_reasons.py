"""What the report says of softmaxes that are left alone: true, and in the words of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph


def why(model: Callable[..., Any], *operands: Tensor) -> list[str]:
    """The reasons for what was left alone."""
    return [missed.reason for missed in attngraph.explain(model, *operands).missed]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, 4, 7, 8), normal(2, 4, 9, 8), normal(2, 4, 9, 6)


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_softmax_in_the_values_is_told_as_that(dim: int) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v.softmax(dim)

    report = attngraph.explain(model, *qkv())
    assert len(report.attention) == 1
    assert [m.reason for m in report.missed] == [
        "it computes values that another softmax weighs, and is no softmax over keys itself"
    ]
