"""Equal layers are recognised once, and the claims are those of a recogniser that looks at each."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.meaning.attention.recogniser import Recogniser
from attngraph.passes import fuse_attention

LAYERS, HEADS, WIDTH = 5, 2, 8


class Layer(nn.Module):
    """Attention of one layer; `number` may matter."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def mask(self, dot: Tensor) -> Tensor:
        return dot.masked_fill(torch.ones_like(dot, dtype=torch.bool).triu(1), -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2).split(HEADS, 1)
        q, k, v = parts
        p = self.mask(q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return x + (p @ v).transpose(1, 2).flatten(2)


class OtherScale(Layer):
    def mask(self, dot: Tensor) -> Tensor:
        return super().mask(dot * (2.0 if self.number == 3 else 1.0))


class OtherMask(Layer):
    def mask(self, dot: Tensor) -> Tensor:
        return super().mask(dot) if self.number % 2 else dot


class OwnBuffer(Layer):
    """The mask is a buffer of each layer; one layer's holds something else."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", hidden.mT.flip(0) if number == 3 else hidden)

    def mask(self, dot: Tensor) -> Tensor:
        return dot.masked_fill(self.hidden, -1e4)


class KeysFirst(Layer):
    """One layer exchanges what it computes from its queries and from its keys."""

    def mask(self, dot: Tensor) -> Tensor:
        return super().mask(dot.mT if self.number == 2 else dot)


def _report(model: nn.Module, x: Tensor) -> Any:
    compiled = attngraph.compile(model, min_scores=0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    passes = [(p.name, p.text, p.notes) for p in compiled.report.passes]
    return passes, compiled.report.attention, compiled.report.missed


def _examined(monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], nn.Module], layers: int) -> int:
    """How many claims were found by looking at formulas; the report is that where all were."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*map(kind, range(layers))).eval(), torch.randn(2, 6, WIDTH)
    count, claim = 0, Recogniser._claim

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return claim(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Recogniser, "_claim", counted)
        found = _report(model, x)
        once, count = count, 0
        patch.setattr(fuse_attention, "OnceRecogniser", Recogniser)
        assert found == _report(model, x)
        assert count == layers
    return once


@pytest.mark.parametrize(
    ("kind", "expected"), [(Layer, 1), (OtherScale, 2), (OtherMask, 2), (OwnBuffer, LAYERS), (KeysFirst, 2)]
)
def test_only_different_layers_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], nn.Module], expected: int
) -> None:
    monkeypatch.setenv("ATTNGRAPH_CACHE", "0")
    assert _examined(monkeypatch, kind, LAYERS) == expected
