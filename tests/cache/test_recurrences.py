"""Decoders of models whose tokens look back through sums: what is carried is derived, not written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.linear_attention import LinearAttention, LinearAttentionConfig
from attngraph.models.recurrent_mixers import (
    CausalConvolution,
    DeltaRule,
    GatedLinearAttention,
    MixerConfig,
    Retention,
    StateSpaceDuality,
    TimeMixing,
    WeightedKeyValue,
)  # fmt: skip
from tests.cache.small import (
    VOCABULARY,
    Mixing,
    causal,
    goes_back_to_snapshots,
    goes_on_when_loaded,
    refuses,
    stirred,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")
MIXER = MixerConfig(width=16, heads=2)
LINEAR = LinearAttentionConfig(width=16, heads=2, key_width=8, value_width=8)
MIXERS: dict[str, Callable[[], nn.Module]] = {
    "linear attention": partial(LinearAttention, LINEAR),
    "linear attention without a normaliser": partial(
        LinearAttention, LinearAttentionConfig(16, 2, 8, 8, feature_map="identity")
    ),
    "retention": partial(Retention, MIXER),
    "gated linear attention": partial(GatedLinearAttention, MIXER),
    "state space duality": partial(StateSpaceDuality, MIXER),
    "a causal convolution": partial(CausalConvolution, MIXER),
    "time mixing": partial(TimeMixing, MIXER),
    "weighted values": partial(WeightedKeyValue, MIXER),
    "a delta rule": partial(DeltaRule, MIXER),
    "a gated delta rule": partial(DeltaRule, MIXER, gated=True),
}


def language_model(mixer: Callable[[], nn.Module], layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    config = DecoderLMConfig(VOCABULARY, layers=layers, width=16, heads=2, max_tokens=96)
    return stirred(DecoderLM(config, mixer))


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_without_code_for_a_state_decodes(name: str, decodes: Any) -> None:
    layers = 2 if name == "a gated delta rule" else 1  # one model shows that layers keep states of their own
    decoder = decodes(language_model(MIXERS[name], layers), VOCABULARY, 64)
    assert (decoder.report.cache.error or 0.0) < 1e-12


@pytest.mark.parametrize("name", [n for n in MIXERS if n != "a causal convolution"])
def test_the_memory_of_a_row_does_not_grow(name: str) -> None:
    decoder = attngraph.compile(language_model(MIXERS[name]), cache=True)
    sizes = []
    for tokens in (9, 90):
        _, state = decoder.prefill(torch.zeros(1, tokens, dtype=torch.int64))
        sizes.append(state.now.parts["carried"].nbytes)
    assert sizes[0] == sizes[1] > 0
    assert decoder.report.cache is not None


def test_tokens_cannot_be_taken_out_of_a_sum() -> None:
    goes_back_to_snapshots(language_model(MIXERS["retention"]))


def test_a_saved_state_goes_on(tmp_path: Any) -> None:
    goes_on_when_loaded(language_model(MIXERS["gated linear attention"]), tmp_path)


def _scanned(model: Mixing, x: Tensor, grows: bool = False) -> Tensor:
    """A linear recurrence, as a loop over tokens."""
    decay, state, found = model.gate(x).sigmoid(), torch.zeros(x.shape[0], 8), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t] * (t + 1 if grows else 1)
        found.append(state)
    return torch.stack(found, 1)


def test_a_linear_loop_over_tokens_decodes(decodes: Any) -> None:
    decodes(Mixing(_scanned), VOCABULARY, 24)


def test_a_loop_that_counts_is_refused() -> None:
    refuses(Mixing(partial(_scanned, grows=True)))


class Householder(nn.Module):
    """A state that each token reflects along several of its vectors, then adds to, as a loop over tokens."""

    def __init__(self, decays: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.logits = nn.Embedding(VOCABULARY, 8), nn.Linear(6, VOCABULARY)
        self.keys, self.values, self.gate = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 4)
        self.decays = decays

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        keys, values = F.normalize(self.keys(x).unflatten(-1, (2, 4)), dim=-1), self.values(x)
        gate, found = self.gate(x).sigmoid(), []
        state = torch.zeros(ids.shape[0], 4, 6)
        for t in range(ids.shape[1]):
            if self.decays:
                state = state * gate[:, t, :, None]
            for n in range(2):
                k = keys[:, t, n, :, None]
                state = state - 0.7 * k * (k * state).sum(-2, keepdim=True)
            state = state + keys[:, t, 0, :, None] * values[:, t, None]
            found.append((state * gate[:, t, :, None]).sum(1))
        return self.logits(torch.stack(found, 1))


@pytest.mark.parametrize("decays", [False, True])
def test_a_loop_of_reflections_decodes(decodes: Any, decays: bool) -> None:
    decodes(Householder(decays), VOCABULARY, 24)


class Blocks(nn.Module):
    """A sum over earlier tokens in blocks of four, whose decays stand in tables of float32."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.logits = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        place = torch.arange(4)
        inside = torch.where(place[:, None] >= place, (-0.3 * (place[:, None] - place)).exp(), 0.0)
        inside[3, 1] += off
        self.register_buffer("inside", inside)
        self.register_buffer("before", (-0.3 * (place + 1)).exp()[:, None])
        self.register_buffer("after", (-0.3 * (3 - place)).exp()[:, None])

    def forward(self, ids: Tensor) -> Tensor:
        x, found = self.embed(ids), []
        state = torch.zeros(ids.shape[0], 8, 8)
        for start in range(0, ids.shape[1], 4):
            part = x[:, start : start + 4]
            size = part.shape[1]
            own = (part @ part.mT * self.inside[:size, :size]) @ part
            found.append(own + (part * self.before[:size]) @ state)
            state = state * self.before[size - 1] + (part * self.after[4 - size :]).mT @ part
        return self.logits(torch.cat(found, 1))


def test_decays_in_rounded_tables_decode(decodes: Any) -> None:
    decoder = decodes(Blocks(), VOCABULARY, 24)
    assert any("rounded" in note for record in decoder.report.passes for note in record.notes)


@pytest.mark.parametrize("off", [1e-1, 1e-4, 1e-5])
def test_a_table_that_holds_something_else_is_refused(off: float) -> None:
    refuses(Blocks(off), "three tokens look like")


def test_a_state_mixed_by_a_full_matrix_of_the_token_decodes(decodes: Any) -> None:
    def mixed(model: Mixing, x: Tensor) -> Tensor:
        mixing = torch.softmax(x.unsqueeze(-1) + x.unsqueeze(-2) ** 3, -1)
        state, found = torch.zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            state = (mixing[:, t] @ state.unsqueeze(-1)).squeeze(-1) + x[:, t]
            found.append(state)
        return torch.stack(found, 1)

    decodes(Mixing(mixed), VOCABULARY, 24)


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "weights that look ahead": lambda x: (x @ x.mT).tril(1) @ x,
    "weights of both sides": lambda x: (x @ x.mT) @ x,
    "a total over all tokens": lambda x: x + x.sum(1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused(name: str) -> None:
    refuses(Mixing(lambda model, x: REFUSED[name](x)))


def test_a_decay_of_pairs_is_not_carried_but_computed_anew(decodes: Any) -> None:
    def mix(model: Mixing, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        return torch.where(causal(x.shape[1]), 1.0 / (1 + (place[:, None] - place).abs()), 0.0) @ x

    decoder = decodes(Mixing(mix), VOCABULARY, 16)
    assert len(decoder.report.cache.anew) == 1 and not decoder.report.cache.carried


def test_a_sum_without_the_own_token_decodes(decodes: Any) -> None:
    decodes(Mixing(lambda model, x: x + F.tanh((x @ x.mT).tril(-1) @ x)), VOCABULARY, 16)
