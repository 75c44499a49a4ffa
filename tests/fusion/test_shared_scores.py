"""Attentions that share weights or scores: joined where only the values differ, and told where one is left.

That they answer as eager does is tested with the spellings (`spellings/shared_scores.py`)."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from tests.cache.small import greedy


def operands() -> tuple[Tensor, ...]:
    q, k, v, more = (
        torch.randn(2, 4, s, d, dtype=torch.float64) for s, d in ((7, 8), (9, 8), (9, 6), (9, 3))
    )
    return q, k, v, more


def of_pairs(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> tuple[Tensor, ...]:
    p = (q @ k.mT).softmax(-1)
    return p @ v, torch.einsum("bij,bijd->bid", p, pairs)


def both_ways(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores.mT.softmax(-1) @ other


def joined(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    p = (q @ k.mT).softmax(-1)
    return p @ v, p @ k


TWICE = "2 attentions, each of which computes the scores"
AGAIN = {
    of_pairs: ((2, 7, 9, 5), [f"its softmax weighs values of different forms: {TWICE}"] * 2),
    both_ways: ((2, 7, 5), [f"its scores have several softmaxes: {TWICE}"] * 2),
    joined: ((1,), [""]),
}


@pytest.mark.parametrize("model", AGAIN, ids=lambda model: model.__name__)
def test_scores_that_several_attentions_compute_are_told(model: Callable[..., Tensor]) -> None:
    shape, wanted = AGAIN[model]
    q, k, v = (torch.randn(2, s, 8, dtype=torch.float64) for s in (7, 9, 9))
    report = attngraph.explain(model, q, k, v, torch.randn(shape, dtype=torch.float64))
    assert [entry.again for entry in report.attention] == wanted and not report.missed
    assert all(text in str(report) for text in wanted)
    assert model is not joined or report.attention[0].value_dim == 16


def test_two_sums_under_one_dropout_lose_the_same_weights() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
        p = F.dropout((q @ k.mT).softmax(-1), 0.5)
        return p @ v - (p @ other)

    q, k, v, _ = operands()
    compiled = attngraph.compile(model)
    assert torch.equal(compiled(q, k, v, v.clone()), torch.zeros(2, 4, 7, 6, dtype=torch.float64))
    assert len(compiled.report.attention) == 1


def test_a_sum_that_is_left_keeps_its_weights_and_is_named() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        return torch.cat([p @ v, torch.einsum("bhij,bijc->bhic", p, pairs)], -1)

    q, k, v, _ = operands()
    report = attngraph.explain(model, q, k, v, torch.randn(2, 7, 9, 5, dtype=torch.float64))
    assert not report.attention
    (missed,) = report.missed
    assert "its weights are also used in another product (" in missed.reason


class DistancesInKeysAndValues(nn.Module):
    """Shaw et al. 2018 (arXiv 1803.02155) as lectures write it: products of queries and of weights with
    tables of distances, one batch for each query."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(9, 8), nn.Embedding(9, 8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens, width = q.shape
        place = torch.arange(tokens)
        distance = (place - place[:, None]).clamp(-4, 4) + 4
        keys, values = self.keys(distance), self.values(distance)
        flat = q.permute(2, 0, 1, 3).reshape(tokens, batch * heads, width) @ keys.mT
        scores = (q @ k.mT + flat.transpose(0, 1).reshape(batch, heads, tokens, tokens)) / width**0.5
        p = scores.masked_fill(torch.ones(tokens, tokens).triu(1) == 1, -1e10).softmax(-1)
        more = p.permute(2, 0, 1, 3).reshape(tokens, batch * heads, tokens) @ values
        return p @ v + more.transpose(0, 1).reshape(batch, heads, tokens, width)


@pytest.mark.slow
def test_scores_of_one_attention_that_another_reads_are_computed_in_the_call() -> None:
    torch.manual_seed(0)
    model = DistancesInKeysAndValues()
    compiled = attngraph.compile(model)
    for batch, tokens in ((2, 7), (1, 9)):
        inputs = torch.randn(3, batch, 4, tokens, 8).unbind()
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
    assert len(compiled.report.attention) == 2
    assert not compiled.report.later


class TwoValues(nn.Module):
    """One layer whose weights, given the sign of their score if `signed`, weigh two tensors."""

    def __init__(self, signed: bool) -> None:
        super().__init__()
        self.signed = signed
        self.embed, self.project, self.head = nn.Embedding(20, 16), nn.Linear(16, 56), nn.Linear(24, 20)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v, more = (
            self.project(self.embed(ids)).unflatten(-1, (2, 28)).transpose(1, 2).split((8, 8, 8, 4), -1)
        )
        s = q @ k.mT / 3
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        p = (s.abs() if self.signed else s).masked_fill(later, -torch.inf).softmax(-1)
        p = p * s.sign() if self.signed else p
        sums = ((p @ x).transpose(1, 2).flatten(2) for x in (v, more))
        logits: Tensor = self.head(torch.cat(list(sums), -1))
        return logits


@pytest.mark.parametrize("signed", [False, True])
def test_a_decoder_of_joined_values_gives_the_tokens_of_the_model(signed: bool) -> None:
    torch.manual_seed(0)
    model = TwoValues(signed).eval()
    ids = torch.randint(0, 20, (2, 5))
    found = attngraph.compile(model, cache=True).generate(ids, max_new_tokens=6)
    assert torch.equal(found, greedy(model, ids, 6))
