"""Decoders of models that torch can trace for one number of tokens alone, because they loop over tokens: what
the model does at larger distances and places than the trace has must be right too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.cache.small import by_steps

TOKENS = 80
KINDS = ("window", "place", "late", "bias", "steps", "blocks", "dilated", "sinks")


class LoopThenAttention(nn.Module):
    """A recurrence over tokens, then attention that does something else from some place or distance on."""

    def __init__(self, kind: str, limit: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.limit = kind, limit
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.qkv, self.gate = nn.Linear(16, 48), nn.Linear(16, 16)
        self.of_distance, self.of_place = nn.Embedding(64, 2), nn.Embedding(limit + 1, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.looped(self.placed(self.embed(ids)))
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = self.masked(q @ k.transpose(-1, -2) / 8**0.5, torch.arange(ids.shape[1]))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def placed(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        if self.kind == "place":
            x = x + self.of_place(at.clamp(max=self.limit))
        if self.kind == "late":
            x = x * torch.where(at < self.limit, 1.0, 0.5)[:, None]
        return x / x.shape[1] if self.kind == "count" else x

    def looped(self, x: Tensor) -> Tensor:
        gate, state, states = torch.sigmoid(self.gate(x)), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = state * gate[:, t] + x[:, t]
            states.append(state)
        return torch.stack(states, 1)

    def masked(self, scores: Tensor, at: Tensor) -> Tensor:
        limit, distance = self.limit, at[:, None] - at
        keep = distance >= 0
        match self.kind:
            case "window":
                keep = keep & (distance < limit)
            case "bias":
                scores = scores + self.of_distance(distance.clamp(0, limit)).permute(2, 0, 1)
            case "steps":
                scores = scores + torch.where(distance < limit, 0.0, -3.0)
            case "blocks":
                keep = keep & (at[:, None] // limit == at // limit)
            case "dilated":
                keep = keep & (distance % limit < 4)
            case "sinks":
                keep = keep & ((distance < limit) | (at < 2))
        return scores.masked_fill(~keep, -math.inf)


# 40 is beyond what is traced, 22 a multiple of the traced number of tokens, 5 below it.
@pytest.mark.parametrize("limit", [40, 22, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_far_tokens_are_as_in_the_model(kind: str, limit: int) -> None:
    model = LoopThenAttention(kind, limit).eval()
    decoder: Any = attngraph.compile(model, cache=True)
    ids = torch.randint(0, 50, (1, TOKENS))
    with torch.no_grad():
        found, wanted = by_steps(decoder, ids, 3)[0], model(ids)
    torch.testing.assert_close(found[:, 2:], wanted[:, 2:])


@pytest.mark.slow
def test_a_result_that_depends_on_the_number_of_tokens_is_refused() -> None:
    decoder: Any = attngraph.compile(LoopThenAttention("count", 40).eval(), cache=True)
    with pytest.raises(attngraph.NoDecoderError, match="for 45 it gives something else"):
        decoder.prefill(torch.randint(0, 50, (1, 9)))
