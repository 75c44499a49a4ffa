"""`prefill` takes the tokens first, or by the name that the model has for them, if that can be told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.cache.models import Small, attend


class Translates(nn.Module):
    """An encoder's result is looked at by a causal decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.embed(source), self.embed(target)
        y = y + attend(y, y, y)
        return y + (y @ x.mT).softmax(-1) @ x


class Either(nn.Module):
    """Takes ids, or what they are embedded as."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor | None = None, embedded: Tensor | None = None) -> Tensor:
        y = self.project(self.embed(ids) if embedded is None else embedded)
        return y + attend(y, y, y)


SOURCE, TARGET = torch.arange(7)[None], torch.arange(5)[None]


def test_the_only_argument_may_be_named() -> None:
    model = Small(lambda m, x: attend(x, x, x))
    decoder = attngraph.compile(model, cache=True)
    torch.testing.assert_close(decoder.prefill(ids=TARGET)[0], model(TARGET))


def test_tokens_that_the_configuration_names_may_be_named() -> None:
    model = Translates().eval()
    decoder = attngraph.compile(model, cache=attngraph.CacheConfig(tokens="target"))
    logits, _ = decoder.prefill(source=SOURCE, target=TARGET)
    torch.testing.assert_close(logits, model(SOURCE, TARGET))


def test_where_it_cannot_be_told_the_error_says_how_to_write_it() -> None:
    decoder = attngraph.compile(Translates().eval(), cache=True)
    with pytest.raises(TypeError, match=r"prefill\(tokens, source=\.\.\.\).*CacheConfig\(tokens='target'\)"):
        decoder.prefill(source=SOURCE, target=TARGET)
    with pytest.raises(TypeError, match="Give them first"):
        decoder.prefill()


def test_another_argument_is_not_taken_for_the_tokens_because_it_is_alone() -> None:
    decoder = attngraph.compile(Translates().eval(), cache=True)
    with pytest.raises(TypeError, match=r"CacheConfig\(tokens='target'\)"):
        decoder.prefill(target=torch.randn(1, 5, 8))


def test_embeddings_do_not_go_on_behind_ids() -> None:
    decoder = attngraph.compile(Either().eval(), cache=attngraph.CacheConfig(tokens="ids", proof=False))
    given = torch.arange(5)[None]
    _, state = decoder.prefill(given)
    with pytest.raises(attngraph.CacheError, match="embeddings go on with embeddings or ids"):
        decoder.decode(torch.randn(1, 5, 8), state)
    assert decoder.decode(given, state).shape == (1, 5, 8)
