"""Decoders of mixers and tables of positions as papers, their first releases and lectures write them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attngraph.capture.trace import capture
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.passes.insert_kv_cache.join_pieces import join_pieces
from tests.cache.small import causal, refuses

WIDTH, HEADS, VOCABULARY, LONGEST = 16, 2, 24, 64
EACH = WIDTH // HEADS
OLD = torch.__version__ < (2, 14)
"""Torch then does not follow how long a slice of a table is, if it is as long as all kept tokens."""


def language_model(mixer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    config = DecoderLMConfig(VOCABULARY, layers=1, width=WIDTH, heads=HEADS, max_tokens=LONGEST)
    return DecoderLM(config, mixer).eval()


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.more = nn.Parameter(torch.randn(4, EACH // 2) / 9)
        self.table = nn.Parameter(torch.randn(LONGEST, EACH))

    def heads(self, x: Tensor, heads: int = HEADS) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def joined(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(x.transpose(1, 2).flatten(2))
        return found


class OfThree(nn.Module):
    """A mixer with a projection for each of queries, keys and values."""

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


class AttentionFree(OfThree):
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


class RandomFeatures(OfThree):
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


class ContextualPositions(OfThree):
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


class Toeplitz(OfThree):
    """Qin et al. 2023, arXiv 2305.04749: one weight for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(LONGEST) / 5)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        weights = self.weights[(place[:, None] - place).clamp(min=0)] * causal(x.shape[1])
        found: Tensor = self.out(weights @ self.v(x))
        return found


class SpatialGate(OfThree):
    """Liu et al. 2021, arXiv 2105.08050: one learned matrix of pairs of places."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(LONGEST, LONGEST) / 5)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights[: x.shape[1], : x.shape[1]].tril()
        found: Tensor = self.out(self.q(x) * (weights @ self.v(x)))
        return found


class MatrixMemory(OfThree):
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


class Forgetting(OfThree):
    """Lin et al. 2025, arXiv 2503.02130: attention with a bias of summed forget gates."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        gates = F.logsigmoid(self.forget(x)).cumsum(1).transpose(1, 2)
        scores = q @ k.mT / 3 + gates[..., :, None] - gates[..., None, :]
        return self.joined(scores.masked_fill(~causal(x.shape[1]), -math.inf).softmax(-1) @ v)


class Difference(Mixer):
    """The difference of two attentions, whose scores are made numbers before the mask is added (Ye et al.
    2024, arXiv 2410.05258)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k = self.heads(x, 2 * HEADS)[:2]
        v = self.heads(x)[2]
        scores = torch.nan_to_num(q @ k.mT / 2)
        scores = scores + torch.triu(torch.full([tokens, tokens], -math.inf), 1)
        pairs = scores.softmax(-1).unflatten(1, (HEADS, 2))
        left = (self.more[0] * self.more[1]).sum().exp() - (self.more[2] * self.more[3]).sum().exp() + 0.4
        return self.joined((pairs[:, :, 0] - left * pairs[:, :, 1]) @ v)


class Skewed(Mixer):
    """Distances by skewing a product with the end of a table (Huang et al. 2018, arXiv 1809.04281)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.heads(x)
        start = LONGEST - tokens
        padded = F.pad(q @ self.table[start:, :].T, (1, 0))
        skewed = padded.reshape(batch, HEADS, tokens + 1, tokens)[:, :, 1:, :]
        return self.joined((q @ k.mT + skewed).masked_fill(~causal(tokens), -math.inf).softmax(-1) @ v)


class ChosenBlocks(Mixer):
    """Each query sees its own block of four keys, and the earlier one whose mean it likes best (Lu et al.
    2025, arXiv 2502.13189)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.heads(x)
        count, place = -(-tokens // 4), torch.arange(tokens)
        block, blocks = place // 4, torch.arange(count)
        means = F.pad(k, (0, 0, 0, 4 * count - tokens)).unflatten(2, (count, 4)).mean(3)
        likes = (q @ means.mT).masked_fill(block[:, None] < blocks, -math.inf)
        likes = likes.masked_fill(block[:, None] == blocks, math.inf)
        best = likes.topk(min(2, count), -1).indices
        chosen = torch.zeros_like(likes, dtype=torch.bool).scatter(-1, best, True)
        seen = chosen.gather(-1, block.expand(batch, HEADS, tokens, tokens)) & causal(tokens)
        return self.joined((q @ k.mT / 3).masked_fill(~seen, -math.inf).softmax(-1) @ v)


class Retained(Mixer):
    """Decays by distance that are made numbers, and rows divided by what they sum to (Sun et al. 2023,
    arXiv 2307.08621)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        distance = place[:, None] - place
        decays = 1 - 2.0 ** (-5 - torch.arange(HEADS).float())
        kept = torch.nan_to_num(torch.where(distance >= 0, decays[:, None, None] ** distance, 0.0))
        scores = (q @ k.mT) * kept
        return self.joined(scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1) @ v)


MIXERS: dict[str, type[nn.Module]] = {
    m.__name__: m for kind in (OfThree, Mixer) for m in kind.__subclasses__()
}


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_of_a_paper_decodes(name: str, decodes: Any) -> None:
    if name == "SpatialGate" and OLD:
        refuses(language_model(MIXERS[name]), "cannot be traced for sequences of any length")
        return
    decodes(language_model(MIXERS[name]), VOCABULARY, 24)


class Positions(nn.Module):
    """A language model of one layer, with a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixer, self.logits = (
            nn.Embedding(VOCABULARY, WIDTH), Mixer(), nn.Linear(WIDTH, VOCABULARY),
        )  # fmt: skip
        self.rows, self.columns = (nn.Parameter(torch.randn(s)) for s in ((1, 8, 1, EACH), (1, 1, 8, EACH)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(*ids.shape)
        q, k, v = self.mixer.heads(x)
        weights = (q @ k.mT).masked_fill(~causal(ids.shape[1]), -math.inf).softmax(-1)
        found: Tensor = self.logits(self.mixer.joined(weights @ v))
        return found

    def positions(self, batch: int, tokens: int) -> Tensor:
        """Two tables side by side, repeated for each sequence and cut to the tokens."""
        parts = [p.expand(batch, 8, 8, EACH).reshape(batch, 64, EACH) for p in (self.rows, self.columns)]
        return torch.cat(parts, -1)[:, :tokens]


def test_a_table_of_rows_and_columns_repeated_for_each_sequence_decodes(decodes: Any) -> None:
    torch.manual_seed(0)
    decodes(Positions(), VOCABULARY, 24)


class InPieces(Mixer):
    """A feed-forward layer after attention, on as many pieces of the tokens as `cut` makes."""

    def __init__(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.cut, self.wide, self.narrow = cut, nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        x = x + self.joined((q @ k.mT).masked_fill(~causal(x.shape[1]), -math.inf).softmax(-1) @ v)
        return torch.cat([self.narrow(F.gelu(self.wide(piece))) for piece in self.cut(x)], 1)


CUTS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "four": lambda x: x.chunk(4, 1),
    "one for each token": lambda x: x.chunk(100, 1),
    "of five": lambda x: x.split(5, 1),
    "slices": lambda x: [x[:, at : at + 3] for at in range(0, x.shape[1], 3)],
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_layer_on_pieces_of_the_tokens_is_computed_as_one(cut: str, decodes: Any) -> None:
    decodes(language_model(functools.partial(InPieces, CUTS[cut])), VOCABULARY, 24)


def test_pieces_that_are_treated_differently_or_see_each_other_are_left() -> None:
    def differently(x: Tensor) -> Tensor:
        a, b = x.split(4, 1)
        return torch.cat([a.sin(), b.cos()], 1)

    def by_themselves(x: Tensor) -> Tensor:
        return torch.cat([p - p.mean(1, keepdim=True) for p in x.split(4, 1)], 1)

    def in_another_order(x: Tensor) -> Tensor:
        a, b = x.split(4, 1)
        return torch.cat([b.sin(), a.sin()], 1)

    def alike(x: Tensor) -> Tensor:
        return torch.cat([p.sin() * 2 for p in x.split(4, 1)], 1)

    found = []
    for model in (differently, by_themselves, in_another_order, alike):
        graph = capture(model, (torch.randn(2, 8, 3),), {}).graph
        found.append(len(join_pieces(graph)))
    assert found == [0, 0, 0, 1]
