"""The one-pass forms equal softmax in three passes, and never hold a matrix of all scores."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.models.online_softmax import FlashAttention, OnlineSoftmaxAttention


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_every_prefix_of_the_recurrence_is_softmax_over_that_prefix() -> None:
    scores, values = 3 * rand(2, 3, 5, 8), rand(2, 3, 8, 4)
    prefixes = OnlineSoftmaxAttention()(scores, values)
    assert prefixes.shape == (2, 3, 8, 5, 4)
    for i in range(8):
        expected = torch.softmax(scores[..., : i + 1], dim=-1) @ values[..., : i + 1, :]
        assert_close(prefixes[..., i, :, :], expected)


def test_the_recurrence_survives_scores_whose_exponentials_overflow() -> None:
    scores = torch.tensor([[-900.0, 5.0, 900.0, 899.0]])
    prefixes = OnlineSoftmaxAttention()(scores, torch.eye(4))
    assert_close(prefixes[2, 0], torch.tensor([0.0, 0.0, 1.0, 0.0]))
    assert_close(prefixes[3, 0], torch.softmax(scores[0], dim=0))


@pytest.mark.parametrize("block", [1, 3, 4, 7, 100])
def test_flash_attention_equals_torchs_own_for_any_block(block: int) -> None:
    query, key, value = rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6)
    expected = functional.scaled_dot_product_attention(query, key, value)
    assert_close(FlashAttention(block)(query, key, value), expected)


@pytest.mark.parametrize("block", [1, 3, 4, 7, 100])
def test_causal_flash_attention_equals_torchs_own_for_any_block(block: int) -> None:
    query, key, value = rand(2, 3, 7, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert_close(FlashAttention(block, causal=True)(query, key, value), expected)


def test_flash_attention_has_the_gradients_of_torchs_own() -> None:
    inputs = [rand(2, 7, 4).requires_grad_() for _ in range(3)]
    weight = rand(2, 7, 4)
    ours = torch.autograd.grad((FlashAttention(3)(*inputs) * weight).sum(), inputs)
    expected = functional.scaled_dot_product_attention(*inputs)
    for mine, theirs in zip(ours, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        assert_close(mine, theirs)


class LargestResult(TorchDispatchMode):
    """Inside, `elements` is the size of the largest tensor that an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_flash_attention_holds_scores_of_one_block_only() -> None:
    query, key, value = rand(64, 4), rand(96, 4), rand(96, 4)
    with LargestResult() as flash:
        FlashAttention(8)(query, key, value)
    with LargestResult() as plain:
        torch.softmax(query @ key.T, dim=-1) @ value
    assert plain.elements == 64 * 96
    assert flash.elements == 64 * 8
