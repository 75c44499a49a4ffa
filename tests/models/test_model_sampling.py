"""Sampling follows the model's probabilities, greedy sampling its best guess, beams its likeliest text."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.sampling import beam_search, nucleus, sample
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


def test_top_p_leaves_the_fewest_tokens_that_reach_it() -> None:
    weights = torch.softmax(LOGITS, dim=0)  # 0.64, 0.09, 0.24, 0.03
    for top_p, kept in ((0.1, [0]), (0.64, [0]), (0.7, [0, 2]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        expected = torch.zeros(4).index_copy(0, torch.tensor(kept), weights[kept])
        assert_close(nucleus(weights[None], top_p)[0], expected)
        assert_close(frequencies(top_p=top_p), expected / expected.sum(), rtol=0, atol=0.01)


def test_top_p_counts_what_top_k_and_the_temperature_leave() -> None:
    cool = torch.softmax(torch.tensor([4.0, 2.0]), dim=0)  # tokens 0 and 2, at temperature 0.5
    assert_close(frequencies(temperature=0.5, top_k=2, top_p=0.87)[0], torch.tensor(1.0))
    assert_close(frequencies(temperature=0.5, top_k=2, top_p=0.9)[[0, 2]], cool, rtol=0, atol=0.01)


def test_beams_as_many_as_there_are_texts_find_the_likeliest_of_all() -> None:
    model = DecoderLM(DecoderLMConfig(layers=1, width=16, heads=4, max_tokens=32, vocab_size=5)).eval()
    ids = torch.randint(0, 5, (2, 3), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        texts = torch.tensor(list(itertools.product(range(5), repeat=2)))
        every = torch.cat([ids[:, None].expand(-1, 25, -1), texts.expand(2, -1, -1)], -1)
        logits = model(every.flatten(0, 1))[:, 2:4].log_softmax(-1).unflatten(0, (2, 25))
        scores = logits.gather(-1, texts.expand(2, -1, -1)[..., None]).squeeze(-1).sum(-1)
    found, total = beam_search(model, ids, 2, 5)
    best = scores.topk(5)
    assert_close(total, best.values)
    assert torch.equal(found, every.gather(1, best.indices[..., None].expand(-1, -1, 5)))


def test_one_beam_is_greedy() -> None:
    model = DecoderLM(DecoderLMConfig(layers=1, width=16, heads=4, max_tokens=32)).eval()
    found, _ = beam_search(model, byte_batch(2, 5), 6, 1)
    assert torch.equal(found[:, 0], sample(model, byte_batch(2, 5), 6, temperature=0.0))


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
    for top_p in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            sample(Always(), torch.zeros(1, 1, dtype=torch.int64), 1, top_p=top_p)
    for beams, words in ((0, "at least 1"), (5, "at most the 4 tokens")):
        with pytest.raises(ValueError, match=words):
            beam_search(Always(), torch.zeros(1, 1, dtype=torch.int64), 1, beams)
