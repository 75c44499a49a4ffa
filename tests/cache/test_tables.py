"""Models that fill a table in their first call, which later calls read: decoders, bisection, conversion."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.api.bisect import bisect
from attngraph.errors import CaptureError
from tests.cache.small import greedy


class Rotary(nn.Module):
    """Rotary positions from tables that `when` says when to fill."""

    def __init__(self, width: int, when: str) -> None:
        super().__init__()
        self.when, self.filled = when, 0
        self.cos: Any = None
        self.frequencies: Tensor
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(0, width, 2) / width))

    def fill(self, tokens: int) -> None:
        self.filled = tokens
        angles = torch.outer(torch.arange(tokens).float(), self.frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[-2]
        match self.when:
            case "another length" if tokens != self.filled:
                self.fill(tokens)
            case "a longer one" if self.cos is None or self.cos.shape[0] < tokens:
                self.fill(tokens)
            case "once" if self.cos is None:
                self.fill(64)
        a, b = x.chunk(2, -1)
        found: Tensor = x * self.cos[:tokens] + torch.cat([-b, a], -1) * self.sin[:tokens]
        return found


class Model(nn.Module):
    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(11, 16), nn.Linear(16, 48), nn.Linear(16, 11)
        self.positions = positions

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = self.positions(q), self.positions(k)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        p = (q @ k.mT / 8**0.5).masked_fill(later, -torch.inf).softmax(-1)
        found: Tensor = self.head((p @ v).transpose(1, 2).flatten(2) + x)
        return found


WHEN = ("another length", "a longer one", "once")


@pytest.mark.parametrize("when", WHEN)
def test_a_decoder_computes_tables_for_any_number_of_tokens(when: str) -> None:
    model = Model(Rotary(8, when)).eval()
    reference = copy.deepcopy(model)
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(0, 11, (2, 6))
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), greedy(reference, ids, 20))
    assert model.positions.filled == 0
    assert decoder.report.cache is not None
    assert decoder.report.cache.most_tokens == (64 if when == "once" else None)
    assert "positions.cos" in decoder.report.cache.unset


@pytest.mark.slow
def test_bisection_and_conversion_run_the_first_call() -> None:
    ids = torch.randint(0, 11, (2, 6))
    model = Model(Rotary(8, "a longer one")).eval()
    assert bisect(model, ids).culprit == ""
    converted = attngraph.convert_heads(Model(Rotary(8, "once")).eval(), ids, kv_heads=1)
    assert converted(ids).shape == (2, 6, 11)
    assert not attngraph.explain(Model(Rotary(8, "once")), ids).breaks


class Flag(nn.Module):
    """Does something else in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.first = False
            return x * 2
        return x


class Scale(nn.Module):
    """Is scaled by what its first call saw."""

    scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.std()
        found: Tensor = x / self.scale
        return found


class Counter(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Rescaled(nn.Module):
    """Halves its weights in its first call, and says so."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.weight, self.halved, self.other = nn.Parameter(torch.randn(8)), False, other

    def forward(self, x: Tensor) -> Tensor:
        before = self.weight.detach().clone()
        if not self.halved:
            with torch.no_grad():
                self.weight.div_(2)
            self.halved = True
        return x * (before if self.other else self.weight)


@pytest.mark.slow
def test_a_first_call_that_writes_to_weights_is_run_once() -> None:
    model = Model(Rescaled(other=False)).eval()
    twin, ids = copy.deepcopy(model), torch.randint(0, 11, (2, 6))
    decoder = attngraph.compile(model, cache=True)
    for _ in range(2):
        logits, _ = decoder.prefill(ids)
        torch.testing.assert_close(logits, twin(ids))
        assert torch.equal(model.positions.weight, twin.positions.weight)


def test_a_first_call_that_writes_to_weights_and_answers_otherwise_leaves_them_as_they_are() -> None:
    model = Model(Rescaled(other=True)).eval()
    before = model.positions.weight.detach().clone()
    with pytest.raises(CaptureError, match="forward\\(\\) changes the attribute positions"):
        attngraph.compile(model, cache=True).prefill(torch.randint(0, 11, (2, 6)))
    assert torch.equal(model.positions.weight, before)
    assert not model.positions.halved


@pytest.mark.parametrize("kind", [Flag, Scale, Counter])
def test_state_that_is_no_table_has_no_decoder(kind: type[nn.Module]) -> None:
    decoder = attngraph.compile(Model(kind()).eval(), cache=True)
    with pytest.raises(CaptureError, match="forward\\(\\) changes the attribute positions"):
        decoder.prefill(torch.randint(0, 11, (2, 6)))


class Registered(nn.Module):
    """A mask in a buffer that is registered empty, and made where there is none or too small a one."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.again = nn.Embedding(24, 8), again
        self.register_buffer("mask", None, persistent=False)

    def hidden(self, tokens: int) -> Tensor:
        if self.mask is not None and self.mask.shape[-1] >= tokens:
            return self.mask[:tokens, :tokens]
        mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        if self.again:
            self.register_buffer("mask", mask, persistent=False)
        else:
            self.mask = mask
        return mask

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + (x @ x.mT).masked_fill(self.hidden(ids.shape[1]), -1e9).softmax(-1) @ x
        return x @ self.embed.weight.T


@pytest.mark.parametrize("again", [False, True])
def test_a_buffer_that_is_made_in_the_first_call_is_no_limit_of_a_decoder(again: bool) -> None:
    model, own = Registered(again).eval(), Registered(again).eval()
    decoder: Any = attngraph.compile(model, cache=True)
    ids = torch.randint(0, 24, (2, 6))
    assert torch.equal(decoder.generate(ids, 40), greedy(own, ids, 40))
    assert decoder.report.cache.unset == ("mask",) and model.mask is None


class Registry:
    """A library's: it has a new table of what it knows after each call, under the types of the operands."""

    def __init__(self) -> None:
        self.known: dict[tuple[type, ...], str] = {}

    def subtract(self, *operands: Tensor) -> Tensor:
        self.known = {**self.known, tuple(map(type, operands)): "subtract"}
        return operands[0][None] - operands[1][:, None]


class Distances(Registered):
    """Asks the first of its buffers for the device, and a library for distances."""

    def __init__(self) -> None:
        super().__init__(True)
        del self._buffers["mask"]
        self.register_buffer("slopes", torch.ones(1), persistent=False)
        self.register_buffer("mask", None, persistent=False)
        self.registry = Registry()

    def hidden(self, tokens: int) -> Tensor:
        device = next(self.buffers()).device
        if self.mask is not None and self.mask.shape[-1] >= tokens:
            return self.mask[:tokens, :tokens]
        places = torch.arange(tokens, device=device)
        self.register_buffer("mask", self.registry.subtract(places, places) > 0, persistent=False)
        found: Tensor = self.mask
        return found


def test_what_a_library_notes_of_the_stand_ins_of_a_trace_is_no_state_of_the_model() -> None:
    model, own = Distances().eval(), Distances().eval()
    ids = torch.randint(0, 24, (2, 6))
    decoder: Any = attngraph.compile(model, cache=True)
    assert torch.equal(decoder.generate(ids, 1), greedy(own, ids, 1))
    assert decoder.report.cache.unset == ("mask",) and model.registry.known == {}


def test_a_buffer_that_is_set_in_every_call_is_a_result() -> None:
    class Setting(Registered):
        def forward(self, ids: Tensor) -> Tensor:
            self.mask = None
            return super().forward(ids)

    model, own = Setting(False).eval(), Setting(False).eval()
    compiled = attngraph.compile(model, strict=True, min_scores=0)
    for tokens in (5, 7):
        ids = torch.randint(0, 24, (2, tokens))
        torch.testing.assert_close(compiled(ids), own(ids))
        assert torch.equal(model.mask, own.mask) and type(model._buffers) is dict
    assert compiled.report.graphs == 1
