"""Tokens divided among simulated ranks: values, gradients, what is fetched, what is not divided and why."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attngraph.report.ranks import ContextEntry

Compared = Callable[..., ContextEntry]
WIDTH, HEADS, KV = 16, 4, 2
ITEM = 8
"""Bytes of a number in float64."""


class Attention(nn.Module):
    """Attention of 4 heads over 2 key/value heads, of one of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(HEADS, 17))
        self.sink = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("slopes", torch.rand(HEADS))

    def forward(self, x: Tensor, about: Tensor | None = None) -> Tensor:
        s = x.shape[1]
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * KV, -1)).transpose(1, 2).chunk(2, 1)
        i = torch.arange(s)
        far = i[:, None] - i
        if self.kind == "rotary":
            angle = (i[:, None] * torch.tensor([1.0, 0.1])).repeat(1, 2)
            q, k = (t * angle.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * angle.sin() for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        scores = q @ k.mT / math.sqrt(WIDTH // HEADS)
        if self.kind == "table":
            scores = scores + self.table[:, far.clamp(-8, 8) + 8]
        if self.kind == "slopes":
            scores = scores - self.slopes[:, None, None] * far
        if self.kind in ("pad", "pad and causal") and about is not None:
            scores = scores.masked_fill(~about[:, None, None], float("-inf"))
        if self.kind == "documents" and about is not None:
            scores = scores.masked_fill((about[:, None] != about[..., None])[:, None], float("-inf"))
        if self.kind not in ("full", "pad", "table"):
            scores = scores.masked_fill(far < 0, float("-inf"))
        if self.kind == "window":
            scores = scores.masked_fill(far >= 3, float("-inf"))
        if self.kind == "chunks":
            scores = scores.masked_fill(i[:, None] // 4 != i // 4, float("-inf"))
        if self.kind == "sink":
            column = self.sink[None, :, None, None].expand(x.shape[0], -1, s, 1)
            p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            p = scores.softmax(-1)
        return x + self.out((p @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind: str, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(32, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Attention(kind) for _ in range(layers))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor, about: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, about)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.norm(x))


def _ids(tokens: int, rows: int = 2) -> Tensor:
    return torch.randint(0, 32, (rows, tokens))


def _keys(entry: ContextEntry, tokens: int, rows: int = 2) -> list[float]:
    """The keys that each rank fetches for an attention, by the bytes in the report."""
    each = rows * KV * (WIDTH // HEADS) * ITEM
    found = [f for f in entry.fetched if f.what == "keys or values"]
    assert len(found) == 2, "keys, and values"
    return [n / each for n in found[0].bytes]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["causal", "full", "window", "chunks", "rotary", "table", "slopes", "sink"])
def test_tokens_are_divided(same_by_tokens: Compared, kind: str, ranks: int) -> None:
    entry = same_by_tokens(Model(kind), ranks, _ids(16))
    assert [a.attentions for a in entry.axes] == [1]
    assert entry.whole == ()
