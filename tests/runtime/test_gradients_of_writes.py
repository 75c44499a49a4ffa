"""Writes in place are results of a graph, and gradients flow through them as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph


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
    function = WRITES[name]
    compiled = attngraph.compile(function)
    for tokens in (6, 9):
        x = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
        found, expected = compiled(x), function(x)
        torch.testing.assert_close(found, expected)
        cotangent = torch.randn_like(expected)
        grads = [torch.autograd.grad(each, x, cotangent)[0] for each in (found, expected)]
        torch.testing.assert_close(*grads)
    assert not compiled.report.breaks


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
    compiled = attngraph.compile(function)
    x = torch.randn(6, 8, requires_grad=True)
    grads = [torch.autograd.grad(each(x).sum(), x)[0] for each in (compiled, function)]
    torch.testing.assert_close(*grads)
    assert "gradients pass by what forward() writes in place" in compiled.report.breaks[0].reason
