"""Decoders on simulated ranks: tokens of one device, and on each rank the cache of its own heads alone."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import attngraph
from attngraph.errors import CheckError
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.report.cache_entry import CacheEntry
from attngraph.report.ranks import CACHE_EXCHANGE
from tests.parallel.models import CLASSES, Shared, ids, on_ranks, stock

FAST = ("LlamaForCausalLM",)
DECODERS = [name for name, (_, _, kept) in CLASSES.items() if kept is not None]


def as_one_device(model: nn.Module, prompts: torch.Tensor, decoder: Any, tokens: int) -> CacheEntry:
    """What a decoder on ranks keeps, whose tokens are those of one device."""
    wanted = attngraph.compile(model, cache=True).generate(prompts, tokens)
    assert torch.equal(decoder.generate(prompts, tokens), wanted)
    cache = decoder.report.cache
    assert isinstance(cache, CacheEntry) and cache.ranks is not None
    return cache


@pytest.mark.parametrize("ranks", [4, 2])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in DECODERS]
)
def test_a_stock_decoder_on_ranks_gives_the_tokens_of_one_device(name: str, ranks: int) -> None:
    model, prompts = stock(name), ids()
    decoder = on_ranks(ranks, model)
    cache, kept = as_one_device(model, prompts, decoder, 6), CLASSES[name][2]
    assert kept is not None and cache.bytes_per_token == kept[ranks // 4]
    assert decoder.prefill(prompts)[1].bytes_per_token == ranks * cache.bytes_per_token
    assert {why for *_, why in cache.ranks.alike} <= {"the heads of every rank attend to it"}
    assert not cache.ranks.alike or all(entry.kv_heads == 1 for entry in decoder.report.attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ranks", [("DeepseekV3ForCausalLM", 2), ("LlamaForCausalLM", 4), ("GemmaForCausalLM", 2)]
)
def test_a_stock_decoder_on_ranks_that_are_to_divide_tokens(name: str, ranks: int) -> None:
    model, prompts = stock(name), ids()
    cache = as_one_device(model, prompts, on_ranks(ranks, model, cache="tokens"), 6)
    kept = CLASSES[name][2]
    assert kept is not None and cache.bytes_per_token == kept[ranks // 4]
    assert {team for *_, team in cache.ranks.tokens} == {2}
    assert not cache.ranks.alike and not cache.ranks.heads


def _lm(**sizes: Any) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(DecoderLMConfig(**{"width": 32, "heads": 4, "layers": 1, **sizes})).eval()


class _Padded(nn.Module):
    """Hides padding, by its id, with a finite number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.qkv, self.out = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in self.qkv(self.table(ids)).chunk(3, -1))
        shown = (ids != 0)[:, None, None] & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        weights = (q @ k.mT).masked_fill(~shown, -1e9).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@torch.no_grad()
def test_ranks_ask_that_no_token_is_hidden_from_itself() -> None:
    model, prompts = _Padded().eval(), ids()
    decoder = on_ranks(2, model)
    torch.testing.assert_close(decoder.prefill(prompts)[0], model(prompts))
    prompts[1, 0] = 0
    with pytest.raises(CheckError, match="hides every key of a token"):
        decoder.prefill(prompts)


@pytest.mark.slow
def test_prefill_decode_beams_sampling_and_an_engine_are_those_of_one_device() -> None:
    model = _lm()
    one, two = attngraph.compile(model, cache=True), on_ranks(2, model)
    prompts = ids()
    both = [decoder.prefill(prompts) for decoder in (one, two)]
    torch.testing.assert_close(both[0][0], both[1][0])
    for tokens in (prompts[:, 0], prompts[:, :3]):
        found = [decoder.decode(tokens, state) for decoder, (_, state) in zip((one, two), both, strict=True)]
        torch.testing.assert_close(*found)
    for state in (both[0][1], both[1][1]):
        state.crop(6)
        state.reorder([1, 0, 1])
    found = [d.decode(prompts[[0, 1, 0], 1], state) for d, (_, state) in zip((one, two), both, strict=True)]
    torch.testing.assert_close(*found)
    for options in ({"num_beams": 3}, {"temperature": 1.0, "seed": 3, "top_k": 20}):
        assert torch.equal(one.generate(prompts, 5, **options), two.generate(prompts, 5, **options))
    told = []
    for decoder in (one, two):
        engine = attngraph.Engine(decoder, max_batch=2, chunk=4)
        requests = [engine.submit(prompts[n % 2, : 3 + n], 4) for n in range(3)]
        engine.run()
        told.append([request.result() for request in requests])
    assert told[0] == told[1]


def test_a_decoder_on_ranks_knows_its_longest_sequence_sees_new_weights_and_is_not_saved(
    tmp_path: Any,
) -> None:
    """Its states are, with the parts of all simulated ranks. Parts of whole parameters are kept between
    steps, but not beyond a change."""
    model = _lm(max_tokens=64)
    decoder, prompts = on_ranks(2, model), ids(1)
    before, state = decoder.prefill(prompts)
    report = decoder.report
    assert report.ranks is not None and report.cache is not None
    assert "position_embedding" in {e.name for e in report.ranks.divided}
    assert report.cache.most_tokens == 64
    with pytest.raises(attngraph.CacheError, match="at most 64 fit"):
        decoder.prefill(ids(1, 65) % 64)
    state.save(tmp_path / "state")
    loaded = attngraph.KVCache.load(tmp_path / "state")
    again = copy.deepcopy(loaded)
    assert torch.equal(decoder.decode(prompts[:, 0], loaded), decoder.decode(prompts[:, 0], state))
    again.rank = (1, 2)
    with pytest.raises(attngraph.CacheError, match="rank 1 of 2"):
        decoder.decode(prompts[:, 0], again)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after, _ = decoder.prefill(prompts)
    torch.testing.assert_close(after, model(prompts))
    assert not torch.allclose(before, after)
    with pytest.raises(attngraph.SavedError, match="divided among ranks"):
        decoder.save(tmp_path / "saved")


@pytest.mark.slow
def test_heads_that_cannot_be_divided_are_kept_by_every_rank_and_told() -> None:
    model = _lm(heads=3, width=24)
    decoder = on_ranks(2, model)
    cache = as_one_device(model, ids(1), decoder, 4)
    assert cache.ranks.heads == () and len(cache.ranks.alike) == 2
    assert cache.bytes_per_token == cache.expanded == 2 * 24 * 4
    assert "kept by every rank: 2 value(s) of 96 bytes a token" in str(decoder.report)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_divide_the_tokens_of_a_latent(ranks: int) -> None:
    model, prompts = Shared(latent=True), ids()
    decoder = on_ranks(ranks, model)
    cache, told = as_one_device(model, prompts, decoder, 24), decoder.report.ranks
    assert told is not None
    assert cache.bytes_per_token == 8 * 4 // ranks
    assert ("heads", 4) in {(e.what, e.count) for e in told.divided}
    assert [(size, team) for _, size, team in cache.ranks.tokens] == [(8 * 4 // ranks, ranks)]
    assert not cache.ranks.alike and CACHE_EXCHANGE in {sent.what for sent in told.sent}
    assert f"a rank keeps 1 of {ranks} tokens" in str(decoder.report)


def test_a_latent_is_kept_by_every_rank_where_heads_alone_are_divided() -> None:
    model = Shared(latent=True)
    cache = as_one_device(model, ids(), on_ranks(2, model, cache="heads"), 4)
    assert cache.bytes_per_token == 8 * 4
    assert [found[1:] for found in cache.ranks.alike] == [(32, "token", "all heads share it")]


def test_tokens_that_cannot_be_divided_are_refused_where_asked_for() -> None:
    with pytest.raises(attngraph.NoDecoderError, match="every rank keeps heads of its own"):
        on_ranks(2, _lm(), cache="tokens").prefill(ids(1))
    with pytest.raises(ValueError, match="cache must be"):
        attngraph.ShardConfig(cache="pages")


@pytest.mark.slow
def test_shared_key_heads_are_told() -> None:
    for cache, told in (
        ("auto", "a rank keeps 1 of 2 tokens"),
        ("heads", "1 x a rank keeps 1 of 2 key/value heads; 2 ranks keep the same"),
    ):
        decoder = on_ranks(4, stock("LlamaForCausalLM"), cache=cache, proof=False)
        decoder.prefill(ids(1))
        assert told in str(decoder.report)
