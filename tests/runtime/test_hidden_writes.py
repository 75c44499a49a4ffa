"""`tensor.data` is followed; a graph for training loses no write in place that gradients pass by."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph import CaptureError

Forward = Callable[..., Tensor]


def attention(q: Tensor, k: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(q @ k.mT).softmax(-1) @ k


# --- what a graph can say ---


def padding_from_data(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    return attention(q, k, lambda s: s.masked_fill_(ids.data.eq(0).unsqueeze(1), -1e9))


def largest_from_data(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    return attention(q, k, lambda s: s - s.data.amax(-1, keepdim=True))


def mask_written_without_gradients(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros(ids.shape)
        mask[ids == 0] = -math.inf
        mask.mul_(2.0)
    return attention(q, k, lambda s: s + mask[:, None])


def detached_copy_written(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    shift = q.detach().clone()
    shift.add_(1.0)
    return attention(q + shift, k, lambda s: s.masked_fill_(ids[:, None] == 0, -1e9))


FOLLOWED = [padding_from_data, largest_from_data, mask_written_without_gradients, detached_copy_written]


# --- what it cannot ---


def data_is_written(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.data.masked_fill_(ids[:, None] == 0, -math.inf)
    return scores.softmax(-1) @ k


def detached_view_is_written(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.detach()[..., 1:].mul_(3.0)
    return scores.softmax(-1) @ k


def written_without_gradients(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    scores = q @ k.mT
    with torch.no_grad():
        scores[..., 2] = -1e9
        scores.mul_(2.0)
    return scores.softmax(-1) @ k


def written_after_gradients_flow_in(q: Tensor, k: Tensor, ids: Tensor) -> Tensor:
    scores = torch.zeros(*q.shape[:2], k.shape[1])
    scores[:, :, 1:] = (q @ k.mT)[:, :, 1:]
    with torch.no_grad():
        scores.mul_(2.0)
    return scores.softmax(-1) @ k


HIDDEN = [
    data_is_written, detached_view_is_written, written_without_gradients, written_after_gradients_flow_in,
]  # fmt: skip


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 6, 8, generator=generator) for _ in range(2))
    return q, k, torch.tensor([[1, 2, 3, 4, 0, 0], [3, 0, 1, 1, 2, 0]])


def with_gradients(forward: Forward) -> tuple[Tensor, Tensor, Tensor]:
    q, k, ids = operands()
    q, k = q.requires_grad_(), k.requires_grad_()
    out = forward(q, k, ids)
    (out * torch.arange(8.0)).sum().backward()
    assert q.grad is not None and k.grad is not None
    return out.detach(), q.grad, k.grad


@pytest.mark.parametrize("forward", FOLLOWED)
def test_these_are_one_graph_and_fused(forward: Forward) -> None:
    compiled = attngraph.compile(forward, strict=True, min_scores=0)
    torch.testing.assert_close(with_gradients(compiled), with_gradients(forward), rtol=1e-4, atol=1e-5)
    assert len(compiled.report.attention) == 1


@pytest.mark.parametrize("forward", HIDDEN)
def test_a_write_that_gradients_pass_by_changes_no_gradient(forward: Forward) -> None:
    compiled = attngraph.compile(forward, min_scores=0)
    for found, expected in zip(with_gradients(compiled), with_gradients(forward), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(CaptureError, match=r"gradients pass by .* at .*test_hidden_writes.py:\d+") as problem:
        with_gradients(attngraph.compile(forward, strict=True, min_scores=0))
    assert "masked_fill for masked_fill_" in str(problem.value)


@pytest.mark.parametrize("forward", HIDDEN)
def test_without_gradients_such_writes_are_one_graph(forward: Forward) -> None:
    compiled = attngraph.compile(forward, strict=True, min_scores=0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*operands()), forward(*operands()), rtol=1e-4, atol=1e-5)
    assert len(compiled.report.attention) == 1


def test_data_is_torchs_own_again_after_a_trace() -> None:
    attngraph.explain(padding_from_data, *operands())
    assert "data" not in vars(Tensor)
    one, other = torch.zeros(3), torch.ones(3)
    one.data = other
    assert one.data_ptr() == other.data_ptr()
