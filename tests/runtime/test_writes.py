"""Writes in place are results of a graph, and gradients flow through them as in eager. `tensor.data` is
followed; a graph for training loses no write that gradients pass by."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph import CaptureError
from tests.runtime.small import agree, gradients, same

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


def with_gradients(forward: Forward) -> tuple[Tensor | None, ...]:
    q, k, ids = operands()
    out = forward(q.requires_grad_(), k.requires_grad_(), ids)
    return (out.detach(), *gradients(out, [q, k]))


@pytest.mark.parametrize("forward", FOLLOWED)
def test_these_are_one_graph_and_fused(forward: Forward) -> None:
    compiled = attngraph.compile(forward, strict=True, min_scores=0)
    same(with_gradients(compiled), with_gradients(forward), 1e-4)
    assert len(compiled.report.attention) == 1


@pytest.mark.parametrize("forward", HIDDEN)
def test_a_write_that_gradients_pass_by_changes_no_gradient(forward: Forward) -> None:
    same(with_gradients(attngraph.compile(forward, min_scores=0)), with_gradients(forward), 1e-4)
    with pytest.raises(CaptureError, match=r"gradients pass by .* at .*test_writes.py:\d+") as problem:
        with_gradients(attngraph.compile(forward, strict=True, min_scores=0))
    assert "masked_fill for masked_fill_" in str(problem.value)
    with torch.no_grad():  # without gradients they are one graph
        agree(forward, operands(), strict=True, min_scores=0, fused=1, tolerance=1e-4)


def test_data_is_torchs_own_again_after_a_trace() -> None:
    attngraph.explain(padding_from_data, *operands())
    assert "data" not in vars(Tensor)
    one, other = torch.zeros(3), torch.ones(3)
    one.data = other
    assert one.data_ptr() == other.data_ptr()


# --- through strides ---


def _write(view: Callable[[Tensor], Tensor], write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        y = x * 1.0
        write(view(y))
        return y * 3

    return function


def _without_oneself(x: Tensor) -> Tensor:
    s = x @ x.mT / 3
    s.fill_diagonal_(-torch.inf)
    return s.softmax(-1) @ x


def _contrastive(x: Tensor) -> Tensor:
    s = x @ x.mT
    s.fill_diagonal_(-1e9)
    return s.logsumexp(-1) - x.sum(-1)


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "attention without the own token": _without_oneself,
    "a contrastive loss": _contrastive,
    "strides": _write(lambda y: y.as_strided((3,), (9,), 0), lambda v: v.fill_(0.5)),
    "strides, scaled": _write(lambda y: y.as_strided((2, 3), (y.shape[1], 2), 1), lambda v: v.mul_(4)),
    "strides of a part": _write(lambda y: y[1:].as_strided((3,), (y.shape[1],)), lambda v: v.exp_()),
    "strides of a turned one": _write(lambda y: y.T.as_strided((4,), (3,), 2), lambda v: v.zero_()),
    "a diagonal that begins anew": _write(lambda y: y, lambda v: v.fill_diagonal_(2.0, wrap=True)),
    "a diagonal of a part": _write(lambda y: y[:, :5], lambda v: v.fill_diagonal_(2.0)),
}


@pytest.mark.parametrize("name", WRITES)
def test_gradients_of_writes_through_strides_are_eagers(name: str) -> None:
    calls = [torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True) for tokens in (6, 9)]
    agree(WRITES[name], *calls, grads=True, tolerance=1e-7, reason="")


def test_the_op_for_writes_through_strides_has_its_finite_differences() -> None:
    x = torch.randn(4, 3, 5, dtype=torch.float64).transpose(0, 1).requires_grad_()
    source = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def scatter(x: Tensor, source: Tensor) -> Tensor:
        found: Tensor = torch.ops.attngraph.strided_scatter(x, source, (2, 3), (15, 2), 4)
        return found

    plain = torch.as_strided_scatter(x.detach(), source.detach(), (2, 3), (15, 2), 4)
    torch.testing.assert_close(scatter(x, source).detach(), plain)
    assert torch.autograd.gradcheck(scatter, (x, source)) and torch.autograd.gradgradcheck(
        scatter, (x, source)
    )


def test_a_write_that_eager_does_not_differentiate_is_refused() -> None:
    torch._dynamo.reset()
    function = _write(lambda y: y[:, 1:], lambda v: v.logical_not_())
    told = "gradients pass by what forward() writes in place"
    agree(function, torch.randn(6, 8, requires_grad=True), grads=True, reason=told)
