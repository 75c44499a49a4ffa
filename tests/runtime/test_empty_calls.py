"""Calls with tensors of no elements answer as eager (a filter that kept nothing, say)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attngraph


def heads(x: Tensor, z: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return (q @ q.mT).softmax(-1) @ q


def by_heads_of_the_batch(x: Tensor, z: Tensor) -> Tensor:
    t, y = x[:, None], x.clone()
    y[..., 0] = 5.0
    return (t @ x[..., :2, :].mT).softmax(-1) @ y[..., :2, :]


def weighted_without_a_softmax(x: Tensor, z: Tensor) -> Tensor:
    t = (x @ x[..., :2, :].mT).softmax(-1) @ x[..., :2, :]
    u = (t.softmax(0) @ z.mT).flip(-1).softmax(-1) @ z.flip(-2)
    return torch.einsum("bij,bij->bi", x, u)


def part_of_the_batch(x: Tensor, z: Tensor) -> Tensor:
    first = x.chunk(2, 0)[0]
    return (first @ first.mT).softmax(-1) @ first


def part_of_the_tokens(x: Tensor, z: Tensor) -> Tensor:
    """Its graph's conditions divide by a number of tokens."""
    first = x.chunk(2, 1)[0]
    return torch.nn.functional.scaled_dot_product_attention(first, first, first, is_causal=True)


def with_a_past(x: Tensor, z: Tensor) -> Tensor:
    k = torch.cat([z, x], 1)
    return (x @ k.mT).softmax(-1) @ k


MODELS = (
    heads, by_heads_of_the_batch, weighted_without_a_softmax, part_of_the_batch, part_of_the_tokens,
    with_a_past,
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda f: f.__name__)
def test_calls_without_elements_answer_as_eager(model: Callable[[Tensor, Tensor], Tensor]) -> None:
    compiled = attngraph.compile(model)
    for rows, tokens, others in ((2, 5, 3), (0, 5, 3), (2, 5, 0), (2, 0, 3)):
        x, z = torch.randn(rows, tokens, 8), torch.randn(rows, others, 8)
        torch.testing.assert_close(compiled(x, z), model(x, z))
        assert not [m.reason for m in compiled.report.missed if "report it" in m.reason]


def test_chunks_of_no_keys_answer_as_eager() -> None:
    """One chunk of queries meets as many chunks of keys as there are, which are none at any size."""

    def model(x: Tensor) -> Tensor:
        q, k = x.roll(1, 1), x.roll(1, 1)[:, :0]
        q, k = (F.pad(t, (0, 0, 0, -q.shape[-2] % 4)).unflatten(-2, (-1, 4)) for t in (q, k))
        return (q @ k.mT).softmax(-1) @ k

    compiled = attngraph.compile(model, min_scores=0)
    for rows in (2, 3):
        x = torch.randn(rows, 4, 8)
        torch.testing.assert_close(compiled(x), model(x))
    (missed,) = compiled.report.missed
    assert "it has no elements" in missed.reason
