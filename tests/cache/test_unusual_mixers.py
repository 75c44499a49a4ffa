"""Decoders of mixers that are neither attention as usual nor a known recurrence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig

WIDTH, HEADS, VOCABULARY, LONGEST = 16, 2, 24, 64
OLD = torch.__version__ < (2, 14)
"""Torch then does not follow how long a slice of a table is, if it is as long as all kept tokens."""


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.forget, self.admit = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return q, k, v

    def joined(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(x.transpose(1, 2).flatten(2))
        return found


class AttentionFree(Mixer):
    """Zhai et al. 2021, arXiv 2105.14103: weights of places and keys, and a gate of the query."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(LONGEST, LONGEST) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        weights = self.places[:tokens, :tokens].masked_fill(~causal(tokens), -math.inf).exp()
        k = self.k(x).exp()
        found: Tensor = self.out(torch.sigmoid(self.q(x)) * (weights @ (k * self.v(x))) / (weights @ k))
        return found


class RandomFeatures(Mixer):
    """Performers (Choromanski et al. 2021, arXiv 2009.14794): positive features, and their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(WIDTH // HEADS, 12))

    def features(self, x: Tensor) -> Tensor:
        return torch.exp(x @ self.directions * 0.4 - x.pow(2).sum(-1, keepdim=True) * 0.08)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = self.features(q), self.features(k)
        sums = torch.einsum("bhnm,bhnd->bhnmd", k, v).cumsum(2)
        found = torch.einsum("bhnm,bhnmd->bhnd", q, sums)
        return self.joined(found / torch.einsum("bhnm,bhnm->bhn", q, k.cumsum(2))[..., None])


class ContextualPositions(Mixer):
    """Golovneva et al. 2024, arXiv 2405.18719: distances are counted by gates of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.randn(WIDTH // HEADS, LONGEST + 1) / 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        seen = causal(x.shape[1])
        scores = q @ k.mT / 3
        gates = torch.sigmoid(scores) * seen
        place = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=LONGEST - 1.0)
        low, high, table = place.floor().long(), place.ceil().long(), q @ self.at
        part = place - low
        scores = scores + table.gather(-1, high) * part + table.gather(-1, low) * (1 - part)
        return self.joined(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v)


class Toeplitz(Mixer):
    """Qin et al. 2023, arXiv 2305.04749: one weight for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(LONGEST) / 5)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        weights = self.weights[(place[:, None] - place).clamp(min=0)] * causal(x.shape[1])
        found: Tensor = self.out(weights @ self.v(x))
        return found


class SpatialGate(Mixer):
    """Liu et al. 2021, arXiv 2105.08050: one learned matrix of pairs of places."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(LONGEST, LONGEST) / 5)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights[: x.shape[1], : x.shape[1]].tril()
        found: Tensor = self.out(self.q(x) * (weights @ self.v(x)))
        return found


class MatrixMemory(Mixer):
    """The mLSTM in parallel form (Beck et al. 2024, arXiv 2405.04517), with exponential gates."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        forgotten = F.logsigmoid(self.forget(x)).cumsum(1).transpose(1, 2)
        admitted = self.admit(x).transpose(1, 2)
        gates = forgotten[..., :, None] - forgotten[..., None, :] + admitted[..., None, :]
        gates = gates.masked_fill(~causal(x.shape[1]), -math.inf)
        largest = gates.amax(-1, keepdim=True)
        weights = q @ k.mT / math.sqrt(WIDTH // HEADS) * torch.exp(gates - largest)
        total = torch.maximum(weights.sum(-1, keepdim=True).abs(), torch.exp(-largest))
        return self.joined(weights / (total + 1e-6) @ v)


class Forgetting(Mixer):
    """Lin et al. 2025, arXiv 2503.02130: attention with a bias of summed forget gates."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        gates = F.logsigmoid(self.forget(x)).cumsum(1).transpose(1, 2)
        scores = q @ k.mT / 3 + gates[..., :, None] - gates[..., None, :]
        return self.joined(scores.masked_fill(~causal(x.shape[1]), -math.inf).softmax(-1) @ v)


MIXERS: dict[str, type[Mixer]] = {
    mixer.__name__: mixer
    for mixer in (
        AttentionFree, RandomFeatures, ContextualPositions, Toeplitz, SpatialGate, MatrixMemory, Forgetting,
    )
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MIXERS)
def test_an_unusual_mixer_decodes(name: str, decodes: Any) -> None:
    torch.manual_seed(0)
    model = DecoderLM(DecoderLMConfig(VOCABULARY, layers=1, width=WIDTH, heads=HEADS, max_tokens=LONGEST),
                      MIXERS[name])  # fmt: skip
    if name == "SpatialGate" and OLD:
        with pytest.raises(attngraph.NoDecoderError, match="cannot be traced for sequences of any length"):
            attngraph.compile(model.eval(), cache=True).prefill(torch.zeros(1, 5, dtype=torch.int64))
        return
    decodes(model.eval(), VOCABULARY, 24)
