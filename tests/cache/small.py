"""What is asked of a decoder of a small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph

VOCABULARY = 24


def stirred(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with weights none of which is zero or one by its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.2 if parameter.ndim > 1 else 0.1)
    return model.eval()


def some_ids(rows: int, tokens: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model: Callable[[Tensor], Tensor], ids: Tensor, new: int) -> Tensor:
    """Tokens, `[B, T]`, and as many new ones, each the likeliest by the logits of the whole sequence."""
    for _ in range(new):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


def refuses(model: nn.Module, match: str = "", rows: int = 1) -> str:
    """No decoder is derived for the model, for this reason."""
    with pytest.raises(attngraph.NoDecoderError, match=match) as problem:
        attngraph.compile(model, cache=True).prefill(torch.zeros(rows, 5, dtype=torch.int64))
    return problem.value.reason


def by_steps(decoder: Any, ids: Tensor, first: int, **given: Any) -> tuple[Tensor, attngraph.KVCache]:
    """The logits of a prompt of the first tokens, and of each other token by itself; and the state."""
    found, state = decoder.prefill(ids[:, :first], **given)
    steps = (decoder.decode(ids[:, t : t + 1], state) for t in range(first, ids.shape[1]))
    return torch.cat([found, *steps], 1), state
