"""Latent attention written head by head: the latent is what is kept, as where all heads are projected at
once; heads that are no projections of one tensor stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from tests.cache.small import greedy

H, C, L, P, R, V = 4, 32, 16, 8, 2, 6


def linears(inner: int, outer: int, bias: bool = False) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inner, outer, bias=bias) for _ in range(H))


class HeadByHead(nn.Module):
    """A language model of one layer whose heads a loop computes from one latent; cases change a part."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.down, self.out = nn.Embedding(50, C), nn.Linear(C, L), nn.Linear(H * V, 50)
        self.query, self.turn, self.turned = linears(C, P), linears(C, R), nn.Linear(C, R)
        self.key_up, self.value_up = linears(L, P, bias), linears(L, V, bias)

    def key(self, latent: Tensor, h: int) -> Tensor:
        return self.key_up[h](latent)

    def value(self, latent: Tensor, h: int) -> Tensor:
        return self.value_up[h](latent)

    def scores(self, x: Tensor, latent: Tensor, h: int) -> Tensor:
        return self.query[h](x) @ self.key(latent, h).mT

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        latent, found = self.down(x), []
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for h in range(H):
            s = (self.scores(x, latent, h) / math.sqrt(P)).masked_fill(later, -math.inf)
            found.append(s.softmax(-1) @ self.value(latent, h))
        return self.out(torch.cat(found, -1))


class Stacked(HeadByHead):
    """The weights of all heads in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.Parameter(torch.randn(H, L, P) / 4)

    def key(self, latent: Tensor, h: int) -> Tensor:
        return latent @ self.ups[h]


class RowsOfOneWeight(HeadByHead):
    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.Parameter(torch.randn(H * P, L) / 4)

    def key(self, latent: Tensor, h: int) -> Tensor:
        return F.linear(latent, self.ups[h * P : (h + 1) * P])


class WithARotaryPart(HeadByHead):
    """A few coordinates that all heads share, beside the projected ones."""

    def scores(self, x: Tensor, latent: Tensor, h: int) -> Tensor:
        q = torch.cat([self.query[h](x), self.turn[h](x)], -1)
        return q @ torch.cat([self.key(latent, h), self.turned(x)], -1).mT


class WithARotarySum(HeadByHead):
    def scores(self, x: Tensor, latent: Tensor, h: int) -> Tensor:
        return super().scores(x, latent, h) + self.turn[h](x) @ self.turned(x).mT


class LatentsApart(HeadByHead):
    """A latent for each head."""

    def key(self, latent: Tensor, h: int) -> Tensor:
        return self.key_up[h](latent * (1 + h))


class OneHeadChanged(HeadByHead):
    def value(self, latent: Tensor, h: int) -> Tensor:
        found = super().value(latent, h)
        return found.tanh() if h == 2 else found


class WeightsFromData(HeadByHead):
    """The matrices depend on the tokens, so nothing may be concatenated once for all calls."""

    def key(self, latent: Tensor, h: int) -> Tensor:
        return latent @ (self.key_up[h].weight.T * latent.mean())


JOINED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a module for each head": (HeadByHead, L),
    "biases": (lambda: HeadByHead(bias=True), L),
    "one parameter of all heads": (Stacked, L),
    "rows of one weight": (RowsOfOneWeight, L),
    "a shared rotary part": (WithARotaryPart, L + R),
    "a product for the rotary part": (WithARotarySum, L + R),
}
APART: dict[str, Callable[[], nn.Module]] = {
    "latents apart": LatentsApart,
    "one head changed": OneHeadChanged,
    "weights from data": WeightsFromData,
}


@pytest.mark.parametrize("name", JOINED)
def test_a_decoder_keeps_the_latent_of_heads_in_a_loop(name: str) -> None:
    make, width = JOINED[name]
    model, ids = make().eval(), torch.randint(0, 50, (2, 7))
    decoder = attngraph.compile(model, cache=True)
    assert torch.equal(decoder.generate(ids, 6), greedy(model, ids, 6))
    assert decoder.report.cache is not None
    assert decoder.report.cache.bytes_per_token == width * 4
    (entry,) = decoder.report.attention
    assert (entry.merged, entry.latent.width, entry.latent.reason) == (H, width, "")


@pytest.mark.parametrize("absorb", ["always", "fold"])
def test_joined_weights_follow_the_weights(absorb: str) -> None:
    model, ids = WithARotaryPart().double().eval(), torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        compiled = attngraph.compile(model, absorb=absorb)
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-10, atol=1e-12)
        model.key_up[1].weight.mul_(2.0)
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-10, atol=1e-12)
    (entry,) = compiled.report.attention
    assert entry.latent is not None and entry.latent.reason == ""


@pytest.mark.parametrize("name", APART)
def test_heads_that_are_no_projections_of_one_tensor_are_left_alone(name: str) -> None:
    model, ids = APART[name]().double().eval(), torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        compiled = attngraph.compile(model, absorb="always")
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-10, atol=1e-12)
    (entry,) = compiled.report.attention
    assert entry.merged == H
    assert entry.latent is None or entry.latent.reason
