"""Models that ask for the number itself of a size: their graphs at several sizes are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import attngraph
from attngraph import NoDecoderError
from attngraph.capture.compared import SIZES, interpolated
from attngraph.errors import CaptureError
from tests.cache.small import refuses


class Model(nn.Module):
    """An attention whose sizes are plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(24, 16), nn.Linear(16, 48), nn.Linear(16, 24)

    def sizes(self, ids: Tensor) -> tuple[Any, Any]:
        rows, tokens = (int(n) for n in ids.shape)
        return rows, tokens

    def bias(self, rows: int, tokens: int) -> Tensor:
        return torch.zeros(())

    def forward(self, ids: Tensor) -> Tensor:
        rows, tokens = self.sizes(ids)
        x = self.embed(ids)
        q, k, v = (t.reshape(rows, tokens, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / 8**0.5 + self.bias(rows, tokens)).masked_fill(later, -torch.inf)
        found = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows * tokens, 16)
        return self.out(found).view(rows, tokens, 24)


class OfRows(Model):
    """The number of sequences alone is a plain number."""

    def sizes(self, ids: Tensor) -> tuple[Any, Any]:
        return int(ids.shape[0]), ids.shape[1]


class OfDistances(Model):
    """A bias for each of `2 * tokens - 1` distances, by a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))

    def bias(self, rows: int, tokens: int) -> Tensor:
        distances = torch.arange(-tokens + 1, tokens).float()
        found = self.near(distances.reshape(2 * tokens - 1, 1))
        at = torch.arange(tokens)
        return found[at[:, None] - at + tokens - 1].permute(2, 0, 1)


class OfALoop(Model):
    """One sequence after the other, in Python."""

    def forward(self, ids: Tensor) -> Tensor:
        tokens, found = ids.shape[1], []
        for x in self.embed(ids):
            q, k, v = self.qkv(x).chunk(3, -1)
            later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            found.append((q @ k.T / 4).masked_fill(later, -torch.inf).softmax(-1) @ v)
        return self.out(torch.stack(found))


class OfTriangle(Model):
    """Scores are written to at the places of a triangle, which takes a number. A token sees itself where it
    sees no other one (Reformer). Every number of tokens divides the size of a weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 16))
        self.embed, self.out = nn.Embedding(29, 16), nn.Linear(16, 29)

    def forward(self, ids: Tensor) -> Tensor:
        x, tokens = self.embed(ids), ids.shape[1]
        q, k, v = self.qkv(torch.cat([x, self.nothing.expand(len(x), 0, 16)], 1)).chunk(3, -1)
        scores, own, (i, j) = q @ k.mT / 4, torch.arange(tokens), torch.triu_indices(tokens, tokens, 1)
        scores[:, own, own] = -5e4
        scores[:, i, j] = torch.finfo(scores.dtype).min
        return self.out(x + scores.softmax(-1) @ v)


@pytest.mark.parametrize("kind", [Model, OfRows, OfDistances, OfALoop, OfTriangle])
def test_numbers_that_follow_from_sequences_and_tokens(kind: type[Model], decodes: Any) -> None:
    decodes(kind())


class OfBlocks(OfRows):
    """What is added depends on how many blocks of tokens there are: two, at all sizes that are compared."""

    def bias(self, rows: int, tokens: int) -> Tensor:
        return torch.arange(tokens) * (0.1 * -(-int(tokens) // 8))


class OfFourRows(OfRows):
    """Four sequences or more are treated otherwise."""

    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        return found.sin() if int(ids.shape[0]) >= 4 else found


@pytest.mark.parametrize("kind", [OfBlocks, OfFourRows])
def test_where_sizes_say_more_the_first_reason_is_told(kind: type[Model]) -> None:
    """The prompt is of equal tokens, whose values are equal whatever weighs them: others are proved with."""
    refuses(kind(), "it fixes how many sequences there are to 2")


@given(st.tuples(*[st.integers(-5, 5)] * 4))
def test_a_number_is_interpolated(formula: tuple[int, int, int, int]) -> None:
    constant, rows, tokens, both = formula
    numbers = [constant + rows * r + tokens * t + both * r * t for r, t in SIZES]
    assert interpolated(numbers) == formula


@pytest.mark.parametrize("number", [lambda r, t: t * t, lambda r, t: t // 2, lambda r, t: max(r, 3)])
def test_a_number_of_another_form_is_refused(number: Any) -> None:
    with pytest.raises(CaptureError, match="a number is"):
        interpolated([number(r, t) for r, t in SIZES])


class InPieces(Model):
    """A layer that is computed for one token after the other, for every second one by other operations."""

    def forward(self, ids: Tensor) -> Tensor:
        pieces = [self.qkv(x)[..., :16] for x in self.embed(ids).split(1, 1)]
        return torch.cat([self.out(x + x if n % 2 else 2 * x) for n, x in enumerate(pieces)], 1)


def test_pieces_of_the_tokens_are_told_with_their_line() -> None:
    decoder: Any = attngraph.compile(InPieces().eval(), cache=True)
    with pytest.raises(NoDecoderError, match=r"split at .*test_compared_sizes.py:\d+: how many results"):
        decoder.prefill(torch.tensor([[1, 2, 3, 4, 5]]))
