"""Decoders of mixers and tables of positions as lectures and first releases of papers write them."""

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

WIDTH, HEADS, VOCABULARY, LONGEST = 16, 2, 24, 64
EACH = WIDTH // HEADS


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


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


MIXERS: dict[str, type[Mixer]] = {m.__name__: m for m in (Difference, Skewed, ChosenBlocks, Retained)}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_of_a_lecture_decodes(name: str, decodes: Any) -> None:
    torch.manual_seed(0)
    config = DecoderLMConfig(VOCABULARY, layers=1, width=WIDTH, heads=HEADS, max_tokens=LONGEST)
    model = DecoderLM(config, MIXERS[name]).eval()
    decodes(model, VOCABULARY, 24)


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


@pytest.mark.few(1)
@pytest.mark.parametrize("cut", CUTS)
def test_a_layer_on_pieces_of_the_tokens_is_computed_as_one(cut: str, decodes: Any) -> None:
    torch.manual_seed(0)
    config = DecoderLMConfig(VOCABULARY, layers=1, width=WIDTH, heads=HEADS, max_tokens=LONGEST)
    decodes(DecoderLM(config, functools.partial(InPieces, CUTS[cut])).eval(), VOCABULARY, 24)


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
