"""What the report says of softmaxes that are left alone: true, and in the words of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


ANOTHER_DIMENSION = "its weights are summed over another dimension than the one that the softmax runs over"
MIXERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda p, mix: torch.einsum("bhqk,hg->bgqk", p, mix),
    "convolution": lambda p, mix: F.conv2d(p, mix[:, :, None, None]),
    "linear": lambda p, mix: F.linear(p.permute(0, 2, 3, 1), mix, mix[0]).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("name", MIXERS)
def test_heads_that_are_mixed_after_the_softmax_are_told(name: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
        return MIXERS[name]((q @ k.mT).softmax(-1), mix) @ v

    (reason,) = why(model, *qkv(), normal(4, 4))
    assert reason.startswith(ANOTHER_DIMENSION)


@pytest.mark.parametrize("name", MIXERS)
def test_heads_that_are_mixed_before_the_softmax_are_told(name: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
        return MIXERS[name](q @ k.mT, mix).softmax(-1) @ v

    (reason,) = why(model, *qkv(), normal(4, 4))
    assert "scores are mixed between heads" in reason


def test_a_softmax_over_the_queries_is_told() -> None:
    (reason,) = why(lambda q, k, v: (q @ k.mT).softmax(-2) @ v, *qkv())
    assert reason.startswith(ANOTHER_DIMENSION)


def test_a_convolution_over_neighbouring_scores_is_told() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d(q @ k.mT, kernel, padding=1).softmax(-1) @ v

    (reason,) = why(model, *qkv(), normal(4, 4, 3, 3))
    assert reason.endswith("a convolution over several places")
