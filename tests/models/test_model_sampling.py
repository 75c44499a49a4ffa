"""Sampling follows the model's probabilities, and greedy sampling its best guess."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.sampling import sample
from attngraph.models.text import byte_batch

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0])


class Always(nn.Module):
    """The same logits everywhere."""

    def forward(self, ids: Tensor) -> Tensor:
        return LOGITS.expand(*ids.shape, 4)


def frequencies(**options: float) -> Tensor:
    ids = torch.zeros(40_000, 1, dtype=torch.int64)
    drawn = sample(Always(), ids, 1, generator=torch.Generator().manual_seed(0), **options)
    return drawn[:, 1].bincount(minlength=4) / 40_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_softmax_at_the_temperature_says(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, dim=0)
    assert_close(frequencies(temperature=temperature), expected, rtol=0, atol=0.01)


def test_top_k_leaves_the_likeliest_in_their_proportions() -> None:
    expected = torch.softmax(LOGITS.index_fill(0, torch.tensor([1, 3]), float("-inf")), dim=0)
    assert_close(frequencies(top_k=2), expected, rtol=0, atol=0.01)
    assert_close(frequencies(top_k=9), torch.softmax(LOGITS, dim=0), rtol=0, atol=0.01)


def test_greedy_sampling_takes_the_best_token_at_every_step() -> None:
    model = DecoderLM(DecoderLMConfig(layers=1, width=16, heads=4, max_tokens=32)).eval()
    ids = byte_batch(2, 5)
    written = sample(model, ids, 6, temperature=0.0)
    assert torch.equal(written[:, :5], ids)
    assert written.shape == (2, 11)
    best = model(written[:, :-1]).argmax(dim=-1)  # the model is causal: one pass has all steps
    assert torch.equal(written[:, 5:], best[:, 4:])


def test_the_same_seed_writes_the_same_text() -> None:
    model = DecoderLM(DecoderLMConfig(layers=1, width=16, heads=4, max_tokens=32)).eval()
    first, again, other = (
        sample(model, byte_batch(2, 5), 8, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_impossible_settings_are_errors() -> None:
    with pytest.raises(ValueError, match="temperature=-1 must not be negative"):
        sample(Always(), torch.zeros(1, 1, dtype=torch.int64), 1, temperature=-1)
    with pytest.raises(ValueError, match="top_k=0 must be at least 1"):
        sample(Always(), torch.zeros(1, 1, dtype=torch.int64), 1, top_k=0)
