"""What tests of decoders share: the smallest of models, and what is asked of a decoder of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph

VOCABULARY, WIDTH = 24, 8


class Mixing(nn.Module):
    """An embedding, `mix` of the model and of `[B, T, WIDTH]`, and logits; with layers that a mix may use."""

    def __init__(self, mix: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.logits = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.gate, self.gru, self.lstm = (
            nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        )  # fmt: skip
        self.begin, self.mix = nn.Parameter(torch.randn(WIDTH)), mix

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.logits(self.mix(self, self.embed(ids)))
        return result


def stirred(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with weights none of which is zero or one by its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.2 if parameter.ndim > 1 else 0.1)
    return model.eval()


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def some_ids(rows: int, tokens: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def refuses(model: nn.Module, match: str = "", rows: int = 1) -> None:
    """No decoder is derived for the model, for this reason."""
    with pytest.raises(attngraph.NoDecoderError, match=match):
        attngraph.compile(model.eval(), cache=True).prefill(torch.zeros(rows, 5, dtype=torch.int64))


def by_steps(decoder: Any, ids: Tensor, first: int) -> tuple[Tensor, attngraph.KVCache]:
    """The logits of a prompt of the first tokens, and of each other token by itself; and the state."""
    found, state = decoder.prefill(ids[:, :first])
    steps = (decoder.decode(ids[:, t : t + 1], state) for t in range(first, ids.shape[1]))
    return torch.cat([found, *steps], 1), state


def goes_back_to_snapshots(model: nn.Module) -> None:
    """Tokens cannot be taken out of what rows carry, but a row goes back to where a call began."""
    decoder = attngraph.compile(model.eval(), cache=attngraph.CacheConfig(snapshots=2))
    ids = some_ids(1, 9)
    _, state = decoder.prefill(ids[:, :5])
    before = decoder.decode(ids[:, 5:6], state)
    decoder.decode(ids[:, 6:8], state)
    with pytest.raises(attngraph.CacheError, match=r"from 8 to 7 tokens.*can go back to 5, 6"):
        state.crop(7)
    state.crop(5)
    torch.testing.assert_close(decoder.decode(ids[:, 5:6], state), before)
    with pytest.raises(attngraph.CacheError, match="snapshots"):
        state.crop(2)


def goes_on_when_loaded(model: nn.Module, path: Any) -> None:
    """A saved state goes on as the state does."""
    decoder = attngraph.compile(model.eval(), cache=True)
    _, state = decoder.prefill(some_ids(2, 9))
    state.save(path / "state")
    loaded, more = attngraph.KVCache.load(path / "state"), torch.tensor([4, 5])
    assert torch.equal(decoder.decode(more, loaded), decoder.decode(more, state))
