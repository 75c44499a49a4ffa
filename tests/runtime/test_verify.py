"""The comparison with eager cannot be passed by an answer that is wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attngraph.runtime.verify import compare


class Fills(nn.Module):
    """A fill that is finite in float32 and, cast from float64, is not: the float64 model has no answer."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.mT).masked_fill(torch.ones(4, 4, dtype=torch.bool), torch.finfo(x.dtype).min)
        return scores.float().softmax(-1).to(x.dtype) @ x


def plus(amount: float) -> Callable[[Tensor], Tensor]:
    return lambda x: Fills()(x) + amount


@pytest.mark.parametrize(("amount", "holds"), [(0.0, True), (1e-7, True), (1e-3, False), (5.0, False)])
def test_where_float64_has_no_answer_eager_itself_is_what_counts(amount: float, holds: bool) -> None:
    x = torch.randn(2, 4, 4)
    assert not Fills()(x.double()).isfinite().all()
    found = compare(plus(amount), Fills(), (x,))
    assert found.holds == holds
    assert holds or "where the float64 model gives NaN" in str(found)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda x: (x, x), "another number of results: 2 instead of 1"),
        (lambda x: x[:1], "another shape: [1, 4] instead of [3, 4]"),
        (lambda x: x.double(), "another dtype: torch.float64 instead of torch.float32"),
        (lambda x: x.log(), "NaN in other places"),
        (lambda x: x / 0, "infinities in other places: 12 instead of 0, first at [0, 0]"),
        (lambda x: x * 1.001, "NOT equal to eager: largest distance"),
    ],
)
def test_an_answer_that_is_wrong_in_anything_does_not_hold(
    wrong: Callable[[Tensor], Tensor], problem: str
) -> None:
    found = compare(wrong, nn.Identity(), (torch.randn(3, 4),))
    assert not found.holds
    assert problem in str(found)
