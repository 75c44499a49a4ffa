"""Decoders of models that compute from the last few tokens: convolutions, shifts, differences, n-grams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attngraph
from tests.cache.small import VOCABULARY, by_steps, refuses, some_ids

Mix = Callable[["Mixed", Tensor, Tensor], Tensor]


class Mixed(nn.Module):
    """An embedding, something that looks at the last tokens, and logits."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.logits, self.mix = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), mix
        self.convolve = nn.Conv1d(8, 8, 4, padding=3, groups=8)
        self.dilated = nn.Conv1d(8, 8, 3, dilation=2, groups=2)
        self.weights = nn.Parameter(torch.randn(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.logits(x + self.mix(self, x, ids))


def causal(model: Mixed, x: Tensor) -> Tensor:
    return model.convolve(x.mT)[..., : x.shape[1]].mT


def before(x: Tensor, count: int, value: float = 0.0) -> Tensor:
    """`[B, width, T + count]`: so many equal values before the first token."""
    return F.pad(x.mT, (count, 0), value=value)


WINDOWS: dict[str, Mix] = {
    "a convolution, cut": lambda m, x, ids: causal(m, x),
    "a dilated convolution in groups": lambda m, x, ids: F.silu(m.dilated(F.pad(x.mT, (4, 0)))).mT,
    "a convolution of a convolution": lambda m, x, ids: causal(m, causal(m, x).tanh()),
    "a convolution after zeros": lambda m, x, ids: m.dilated(
        torch.cat([x.new_zeros(x.shape[0], 8, 4), x.mT], 2)
    ).mT,
    "convolutions one after the other, of zeros before the first": lambda m, x, ids: m.dilated(
        F.silu(m.dilated(F.pad(x.mT, (8, 0)))) * 0.5 + 0.25
    ).mT,
    "a shift by padding": lambda m, x, ids: F.pad(x, (0, 0, 1, -1)),
    "a shift by cat": lambda m, x, ids: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "a shift by two": lambda m, x, ids: F.pad(x.mT, (2, 0))[..., :-2].mT,
    "a shift that keeps the first token": lambda m, x, ids: torch.cat([x[:, :1], x[:, :-1]], 1),
    "a roll, masked": lambda m, x, ids: x.roll(1, 1).masked_fill(
        (torch.arange(x.shape[1]) == 0)[:, None], 2.0
    ),
    "a difference": lambda m, x, ids: F.pad(x[:, 1:] - x[:, :-1], (0, 0, 1, 0)),
    "a shift of tokens and features": lambda m, x, ids: F.pad(x, (-1, 1, 1, -1)),
    "the largest of three": lambda m, x, ids: F.max_pool1d(before(x, 2, -torch.inf), 3, 1).mT,
    "the largest of three and nought": lambda m, x, ids: F.max_pool1d(before(x, 2), 3, 1).mT,
    "the largest of every other token": lambda m, x, ids: F.max_pool1d(before(x, 4), 3, 1, dilation=2).mT,
    "the largest, padded twice": lambda m, x, ids: F.max_pool1d(before(x, 1), 3, 1, 1)[..., : x.shape[1]].mT,
    "the largest of tokens and features": lambda m, x, ids: F.max_pool2d(
        F.pad(x[:, None], (0, 1, 2, 0)), (3, 2), 1
    )[:, 0],
    "the smallest of many": lambda m, x, ids: -F.max_pool1d(-before(x, 29), 30, 1).mT,
    "a mean": lambda m, x, ids: F.avg_pool1d(before(x, 2), 3, 1).mT,
    "a mean of what there is": lambda m, x, ids: F.avg_pool1d(before(x, 1), 3, 1, 1, count_include_pad=False)[
        ..., : x.shape[1]
    ].mT,
    "a mean before a convolution": lambda m, x, ids: causal(m, F.avg_pool1d(before(x, 2), 3, 1).mT),
    "the largest after a convolution": lambda m, x, ids: F.max_pool1d(before(causal(m, x), 2), 3, 1).mT,
    "windows, weighed": lambda m, x, ids: before(x, 2).unfold(-1, 3, 1).transpose(1, 2) @ m.weights,
    "a trigram": lambda m, x, ids: m.embed(
        (F.pad(ids, (2, -2), value=3) * 7 + F.pad(ids, (1, -1), value=1) * 3 + ids) % VOCABULARY
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_of_tokens_decodes(name: str, decodes: Any) -> None:
    decoder = decodes(Mixed(WINDOWS[name]), VOCABULARY, 24)
    assert any("computed from the last" in note for record in decoder.report.passes for note in record.notes)


class Convolutional(nn.Module):
    """Keys after a convolution, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.logits = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.convolve = nn.Conv1d(8, 8, 3, padding=2, groups=8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        k = self.convolve(x.mT)[..., : x.shape[1]].mT
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        return self.logits((x @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ x)


def test_attention_over_convolved_keys_decodes(decodes: Any) -> None:
    torch.manual_seed(0)
    decodes(Convolutional(), VOCABULARY, 24)


def test_a_window_can_be_undone_as_far_as_it_was_kept() -> None:
    decoder = attngraph.compile(
        Mixed(WINDOWS["a convolution, cut"]).eval(), cache=attngraph.CacheConfig(rollback=2)
    )
    ids = some_ids(1, 9)
    _, state = decoder.prefill(ids[:, :6])
    before = decoder.decode(ids[:, 6:7], state)
    state.crop(6)
    assert torch.equal(decoder.decode(ids[:, 6:7], state), before)
    decoder.decode(ids[:, 7:9], state)
    with pytest.raises(attngraph.CacheError, match="a window of 4"):
        state.crop(4)


@pytest.mark.parametrize(
    "mix",
    [
        lambda m, x, ids: F.pad(x, (0, 0, -1, 1)),
        lambda m, x, ids: F.conv1d(x.mT, m.dilated.weight, padding=2, dilation=2, groups=2).mT,
        lambda m, x, ids: m.convolve(x.mT)[..., 1 : x.shape[1] + 1].mT,
        lambda m, x, ids: F.max_pool1d(x.mT, 3, 1, 1).mT,
        lambda m, x, ids: F.avg_pool1d(before(x, 1), 3, 1, 1)[..., 1 : x.shape[1] + 1].mT,
        lambda m, x, ids: F.pad(x.mT, (0, 2)).unfold(-1, 3, 1).amax(-1).mT,
    ],
)
def test_what_looks_ahead_is_refused_with_a_pair_of_tokens(mix: Mix) -> None:
    refuses(Mixed(mix), r"Token \d+ sees token \d+")


@pytest.mark.parametrize(
    "mix",
    [
        lambda m, x, ids: m.convolve(m.convolve(x.mT))[..., : x.shape[1]].mT,
        lambda m, x, ids: m.dilated(F.pad(x.mT, (4, 0), value=1.0)).mT,
        lambda m, x, ids: m.dilated(F.pad(m.dilated(F.pad(x.mT, (5, 0))), (3, 0))).mT,
        lambda m, x, ids: F.pad(m.dilated(F.pad(x.mT, (5, 0))), (1, -2)).mT,
    ],
)
def test_a_convolution_that_reads_other_than_zeros_before_the_first_token_is_refused(mix: Mix) -> None:
    refuses(Mixed(mix), r"conv1d|pad")


def test_what_pooling_reads_of_later_tokens_is_told() -> None:
    model = Mixed(lambda m, x, ids: F.max_pool1d(x.mT, 5, 1, 2).mT).eval()
    with pytest.raises(
        attngraph.NoDecoderError, match=r"reads token t - 2 to token t \+ 2\. Token 0 sees token 1"
    ):
        attngraph.compile(model, cache=True).prefill(torch.zeros(1, 5, dtype=torch.int64))


def test_features_that_are_summed_within_a_window_are_refused() -> None:
    model = Mixed(lambda m, x, ids: F.pad((x[:, 1:] - x[:, :-1]) @ m.logits.weight[:8], (0, 0, 1, 0))).eval()
    refuses(model, "slice at")


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("dilation", [1, 3])
def test_pooled_tokens_are_those_of_a_loop_over_windows(width: int, dilation: int) -> None:
    back = dilation * (width - 1)
    model = Mixed(lambda m, x, ids: F.max_pool1d(before(x, back, -0.1), width, 1, dilation=dilation).mT)
    model = model.double().eval()
    ids = some_ids(2, 19)
    found, _ = by_steps(attngraph.compile(model, cache=True), ids, 4)
    with torch.no_grad():
        x = model.embed(ids)
        nothing = torch.full_like(x[:, 0], -0.1)
        for t in range(19):
            seen = [x[:, t - n * dilation] if t >= n * dilation else nothing for n in range(width)]
            wanted = model.logits(x[:, t] + torch.stack(seen).amax(0))
            torch.testing.assert_close(found[:, t], wanted, rtol=1e-12, atol=1e-12)


def test_a_step_costs_the_same_whatever_came_before() -> None:
    """The memory of a row does not grow."""
    decoder = attngraph.compile(Mixed(WINDOWS["a convolution, cut"]).eval(), cache=True)
    sizes = []
    for tokens in (64, 640):
        _, state = decoder.prefill(torch.zeros(1, tokens, dtype=torch.int64))
        sizes.append(state.nbytes)
    assert sizes[0] == sizes[1]


class TwoWindows(nn.Module):
    """Attention to the last 4 tokens, then to the last 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.into = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, place = self.embed(ids), torch.arange(ids.shape[1])
        apart = place[:, None] - place
        for into, window in zip(self.into, (4, 64), strict=True):
            q, k, v = into(x).chunk(3, -1)
            hidden = (apart < 0) | (apart >= window)
            x = x + (q @ k.mT / 4).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.head(x)


def test_rows_go_back_as_far_as_every_window_has_kept_tokens() -> None:
    torch.manual_seed(0)
    model, ids = TwoWindows().eval(), torch.randint(0, 29, (1, 100))
    decoder = attngraph.compile(model, cache=attngraph.CacheConfig(rollback=8))
    _, state = decoder.prefill(ids[:, :90])
    decoder.decode(ids[:, 90:], state)
    state.crop(92)
    with torch.no_grad():
        wanted = model(ids[:, :93])[:, -1:]
    torch.testing.assert_close(decoder.decode(ids[:, 92:93], state), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(attngraph.CacheError, match="a window of 4 has overwritten"):
        state.crop(91)
