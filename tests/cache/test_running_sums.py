"""A decoder of a model that adds up tokens as they come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.cache.small import VOCABULARY, Mixing, causal, refuses

NEW = 12


class Counting(nn.Module):
    """Positions that count the tokens before that are no padding, as in RoBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(40, 8, padding_idx=1)
        self.logits = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        real = ids.ne(1).int()
        x = self.embed(ids) + self.places((real.cumsum(1).type_as(real) * real).long() + 1)
        return self.logits((x @ x.mT).masked_fill(~causal(ids.shape[1]), -torch.inf).softmax(-1) @ x)


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of vectors": lambda x: x.cumsum(1),
    "of numbers": lambda x: x * x.sum(-1).cumsum(1).tanh()[..., None],
    "of heads": lambda x: x.unflatten(-1, (2, 4)).transpose(1, 2).cumsum(2).transpose(1, 2).flatten(2),
    "of counts": lambda x: x + (x > 0).cumsum(1) % 7,
    "of a running sum": lambda x: x.cumsum(1).tanh().cumsum(1),
    "a running mean": lambda x: x.cumsum(1) / (1 + torch.arange(x.shape[1])[:, None]),
    "a running log-sum-exp": lambda x: x.exp().cumsum(1).log(),
}


def assert_as_the_whole_sequence(model: nn.Module, ids: Tensor) -> attngraph.CompileReport:
    decoder = attngraph.compile(model, cache=True)
    found, whole = decoder.generate(ids, NEW), ids
    for _ in range(NEW):
        whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, whole)
    report = decoder.report
    assert report.cache is not None
    assert (report.cache.error or 0.0) < 1e-12
    return report


@pytest.mark.parametrize("name", SUMS)
def test_a_running_sum_gives_the_tokens_of_the_whole_sequence(name: str) -> None:
    torch.manual_seed(0)
    report = assert_as_the_whole_sequence(
        Mixing(lambda model, x: SUMS[name](x)).eval(), torch.randint(0, VOCABULARY, (2, 5))
    )
    assert any("running sum" in note for record in report.passes for note in record.notes)


def test_positions_that_count_tokens_are_exact_whatever_the_tokens_are() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (3, 7))
    ids[0, 2:4] = 1  # tokens that are not counted
    assert_as_the_whole_sequence(Counting().eval(), ids)


def masked_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.softmax(-1) @ k.exp().mT).tril()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def summed_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.softmax(-1), k.softmax(-1)
    return torch.einsum("bhtd,bhtde->bhte", q, torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2))


def beside_a_summed_normaliser(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.softmax(-1), k.exp()
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    weights = torch.einsum("bhid,bhjd->bhij", q, k).masked_fill(later, 0)
    return weights @ v / torch.einsum("bhid,bhid->bhi", q, k.cumsum(2))[..., None]


def a_loop_over_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = q.softmax(-1), k.softmax(-1)
    state, found = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        state = state + k[:, :, t, :, None] * v[:, :, t, None]
        found.append((q[:, :, t, None] @ state).squeeze(2))
    return torch.stack(found, 2)


class Linear(nn.Module):
    """Linear attention of two heads whose features are a softmax."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.logits, self.mix = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), mix
        self.project = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in self.project)
        return self.logits(x + self.mix(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "mix", [masked_products, summed_products, beside_a_summed_normaliser, a_loop_over_tokens]
)
def test_a_softmax_over_features_belongs_to_its_token(
    mix: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """It weighs what a running sum has for each feature, and is no attention that keeps keys."""
    torch.manual_seed(0)
    report = assert_as_the_whole_sequence(Linear(mix).eval(), torch.randint(0, VOCABULARY, (2, 9)))
    assert report.cache is not None
    assert report.cache.bytes_per_token == 0


class SortedExperts(nn.Module):
    """Tokens are sorted by the expert that they choose; how many chose each is read as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.route = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.logits = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).reshape(-1, 8)
        _, chosen = self.route(x).topk(2, dim=1)
        counts = torch.zeros(x.shape[0], 3).scatter(1, chosen, 1).long().sum(0).tolist()
        order = chosen.flatten().sort(0)[1]
        token = order.div(2, rounding_mode="trunc")
        parts = x[token].split(counts)
        found = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        mixed = torch.zeros_like(x).index_add(0, token, found).reshape(*ids.shape, 8)
        return self.logits(
            (mixed @ mixed.mT).masked_fill(~causal(ids.shape[1]), -torch.inf).softmax(-1) @ mixed
        )


def test_experts_that_count_their_tokens_treat_each_token_by_itself() -> None:
    torch.manual_seed(0)
    assert_as_the_whole_sequence(SortedExperts().eval(), torch.randint(0, VOCABULARY, (2, 5)))


def _steps_that_differ(model: Mixing, x: Tensor) -> Tensor:
    state, found = torch.zeros(x.shape[0], 8), []
    for place, token in enumerate(x.unbind(1)):
        state = torch.tanh(state + place * token)
        found.append(state)
    return torch.stack(found, 1)


def test_a_loop_that_is_no_sum_and_not_of_equal_steps_is_refused_with_its_line() -> None:
    reasons = r"test_running_sums.*tanh of several tokens.*no loop of equal steps: the step of token"
    refuses(Mixing(_steps_that_differ), reasons)


LINEAR: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a window of 100 tokens": (lambda d: (d >= 0) & (d < 100), True),
    "a decay from 200 tokens on": (lambda d: (d >= 0) * 0.9 ** (d - 200.0).clamp(min=0), True),
    "a distance in hundreds": (lambda d: (d >= 0) & (d * 0.01 < 1.5), True),
    "a root of the distance": (lambda d: (d >= 0) & (d.clamp(min=0).sqrt() < 12.0), True),
    "a quotient": (lambda d: (d >= 0) & (d // 10 // 10 < 1), True),
    "a later token far ahead": (lambda d: (d >= 0) | (d == -100), False),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_sum_is_compared_on_more_tokens_than_its_numbers_reach(name: str) -> None:
    """Three tokens of it, and seventy, look like a sum that can be carried."""
    weights, is_causal = LINEAR[name]

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.key, self.out = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13)

        def forward(self, ids: Tensor) -> Tensor:
            x, at = self.embed(ids), torch.arange(ids.shape[1])
            k = self.key(x).tanh()
            return self.out((x @ k.mT * weights(at[:, None] - at)) @ k)

    model, ids = Linear().eval().double(), torch.randint(0, 13, (1, 330))
    decoder = attngraph.compile(model, cache=True)
    with torch.no_grad():
        if not is_causal:
            with pytest.raises(attngraph.NoDecoderError, match="three tokens look like one, but more do not"):
                decoder.prefill(ids[:, :9])
            return
        logits, state = decoder.prefill(ids[:, :9])
        torch.testing.assert_close(torch.cat([logits, decoder.decode(ids[:, 9:], state)], 1), model(ids))
