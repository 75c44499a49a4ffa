"""What is found with a buffer's values holds for these values alone: when they change, it is found again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph

VOCABULARY, TOKENS, KEPT = 11, 12, 6


class Mixer(nn.Module):
    """A table in a buffer says how much a token takes from which."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.logits = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.register_buffer("table", table)

    def forward(self, ids: Tensor) -> Tensor:
        x, tokens = self.embed(ids), ids.shape[1]
        return self.logits((x @ x.mT * self.table[:tokens, :tokens]) @ x)


class Ahead(Mixer):
    """A number in a buffer says how much a token takes from the next one."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.logits(x + self.table * torch.cat([x[:, 1:], x[:, :1]], 1))


def causal() -> Tensor:
    return torch.ones(32, 32).tril()


def decays() -> Tensor:
    place = torch.arange(32)
    return (0.9 ** (place[:, None] - place)).tril()


def _one_entry(table: Tensor) -> None:
    table[5, 2] += 0.3


def _all_ones(table: Tensor) -> None:
    table.fill_(1.0)


CASES = [
    pytest.param(lambda: Mixer(causal()), _all_ones, id="a mask that then shows all"),
    pytest.param(lambda: Mixer(decays()), _one_entry, id="a table of decays"),
    pytest.param(lambda: Ahead(torch.zeros(1)), _all_ones, id="a factor of nothing"),
]


@pytest.mark.parametrize(("make", "change"), CASES)
def test_a_decoder_is_derived_again_or_refused(
    make: Callable[[], Mixer], change: Callable[[Tensor], None]
) -> None:
    model = make().eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    with torch.no_grad():
        decoder.prefill(ids[:, :KEPT])
        change(model.table)
        try:
            logits, state = decoder.prefill(ids[:, :KEPT])
        except attngraph.NoDecoderError:
            return  # no decoder is right for the new values
        found = [logits, *(decoder.decode(ids[:, at : at + 1], state) for at in range(KEPT, TOKENS))]
        torch.testing.assert_close(torch.cat(found, 1), model(ids), rtol=1e-4, atol=1e-4)


def test_a_state_of_other_values_does_not_go_on() -> None:
    model = Mixer(decays()).eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    with torch.no_grad():
        _, state = decoder.prefill(ids[:, :KEPT])
        model.table.mul_(0.5)
        with pytest.raises(attngraph.CacheError, match="has changed since the prompt"):
            decoder.decode(ids[:, KEPT : KEPT + 1], state)
        logits, state = decoder.prefill(ids[:, :KEPT])
        logits = decoder.decode(ids[:, KEPT : KEPT + 1], state)
        torch.testing.assert_close(logits[:, -1], model(ids[:, : KEPT + 1])[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("make", "change"), CASES)
def test_a_compiled_model_is_traced_again(
    make: Callable[[], Mixer], change: Callable[[Tensor], None]
) -> None:
    model = make().eval()
    compiled = attngraph.compile(model, min_scores=0)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    with torch.no_grad():
        compiled(ids)
        change(model.table)
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)


def test_a_buffer_whose_values_nothing_was_found_with_may_change() -> None:
    class Scaled(Mixer):
        def forward(self, ids: Tensor) -> Tensor:
            x, tokens = self.embed(ids) * self.table, ids.shape[1]
            mask = torch.ones(tokens, tokens).tril().bool()
            return self.logits((x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ x)

    model = Scaled(torch.rand(8) + 1).eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    with torch.no_grad():
        decoder.prefill(ids)
        model.table.mul_(2)
        logits, _ = decoder.prefill(ids)
        torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-4)
    assert len(decoder._derived.all()) == 1
