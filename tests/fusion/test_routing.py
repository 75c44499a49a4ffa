"""Softmaxes that choose: routers are no attention, a choice among products of queries and keys may be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import testing


class Experts(nn.Module):
    """A mixture of experts; `choose` makes weights `[..., 2]` and the experts' numbers from scores."""

    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.router, self.choose = nn.Linear(8, 6), choose
        self.experts = nn.Parameter(torch.randn(6, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(self.router(x))
        return (weights[..., None, None] * self.experts[chosen] @ x[..., None, :, None]).sum(-3)[..., 0]


def softmax_first(scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(scores, -1).topk(2, -1)  # type: ignore[return-value]


def softmax_first_rescaled(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = torch.softmax(scores, -1).topk(2, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


def softmax_last(scores: Tensor) -> tuple[Tensor, Tensor]:
    found, chosen = scores.topk(2, -1)
    return found.softmax(-1), chosen


def within_groups(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Experts of the best of three groups only."""
    weights = scores.softmax(-1)
    best = weights.unflatten(-1, (3, 2)).amax(-1, keepdim=True)
    kept = (best >= best.amax(-2, keepdim=True)).expand(*best.shape[:-1], 2).flatten(-2)
    return weights.masked_fill(~kept, 0.0).topk(2, -1)  # type: ignore[return-value]


ROUTERS = [softmax_first, softmax_first_rescaled, softmax_last, within_groups]


@pytest.mark.parametrize("choose", ROUTERS)
def test_a_router_is_listed_but_does_not_count_as_left_alone(
    choose: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    model, x = Experts(choose), torch.randn(2, 5, 8)
    report = attngraph.explain(model, x)
    (missed,) = report.missed
    assert "as a router of experts does: this is no attention" in missed.reason
    assert report.unfused == ()
    assert "0 of 1 softmax-like places fused (1 is no attention)" in str(report)
    strict = attngraph.compile(model, strict=True, min_scores=0)
    torch.testing.assert_close(strict(x), model(x))


def few_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the two best keys of each query."""
    scores, chosen = (q @ k.mT).topk(2, -1)
    return (scores.softmax(-1)[..., None] * v[torch.arange(q.shape[0])[:, None, None], chosen]).sum(-2)


def few_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that keeps its two largest weights."""
    weights, chosen = (q @ k.mT / 3).softmax(-1).topk(2, -1)
    return (weights[..., None] * v[torch.arange(q.shape[0])[:, None, None], chosen]).sum(-2)


@pytest.mark.parametrize("model", [few_keys, few_weights])
def test_attention_to_few_keys_is_not_denied(model: Callable[..., Tensor]) -> None:
    operands = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 4)
    report = attngraph.explain(model, *operands)
    (missed,) = report.unfused
    assert "the largest few" in missed.reason and "no attention" not in missed.reason
    with pytest.raises(attngraph.NotFusedError):
        attngraph.compile(model, strict=True, min_scores=0)(*operands)


class Layer(nn.Module):
    """Attention, then a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(softmax_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x + (x @ x.mT).softmax(-1) @ x)


def test_assert_fused_passes_over_routers() -> None:
    testing.compile(Layer(), torch.randn(2, 5, 8)).assert_fused()
