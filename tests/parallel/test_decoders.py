"""Decoders on simulated ranks: tokens of one device, and on each rank the cache of its own heads alone."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.report.ranks import CACHE_EXCHANGE

LLAMA = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0,
}  # fmt: skip
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 40,
}  # fmt: skip
GPT2 = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
CLASSES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "GPT2LMHeadModel": (GPT2, (128, 64)),
    "LlamaForCausalLM": (LLAMA, (64, 32)),
    "GPTNeoXForCausalLM": ({**SIZES, "rotary_pct": 0.5}, (128, 64)),
    "BloomForCausalLM": ({"n_layer": 1, "hidden_size": 32, "n_head": 4}, (128, 64)),
    "OPTForCausalLM": ({**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}, (128, 64)),
    "MptForCausalLM": ({"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 32}, (128, 64)),
    "FalconForCausalLM": (
        {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}, (32, 16)),
    "MistralForCausalLM": ({**LLAMA, "sliding_window": 3}, (64, 32)),
    "Qwen2ForCausalLM": (LLAMA, (64, 32)),
    "Qwen3ForCausalLM": ({**LLAMA, "head_dim": 8}, (64, 32)),
    "GemmaForCausalLM": ({**LLAMA, "head_dim": 8, "num_key_value_heads": 1}, (32, 16)),
    "Gemma2ForCausalLM": ({**LLAMA, "head_dim": 8, "num_hidden_layers": 2}, (128, 64)),
    "PhiForCausalLM": ({**LLAMA, "num_key_value_heads": 4}, (128, 64)),
    "Phi3ForCausalLM": (LLAMA, (64, 32)),
    "OlmoForCausalLM": (LLAMA, (64, 32)),
    "Olmo2ForCausalLM": (LLAMA, (64, 32)),
    "CohereForCausalLM": ({**LLAMA, "use_qk_norm": True}, (64, 32)),
    "StableLmForCausalLM": ({**LLAMA, "qk_layernorm": True}, (64, 32)),
    "GraniteForCausalLM": (LLAMA, (64, 32)),
    "Starcoder2ForCausalLM": (LLAMA, (64, 32)),
    "PersimmonForCausalLM": ({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, (128, 64)),
    "GPTBigCodeForCausalLM": (GPT2, (32, 16)),
    "MixtralForCausalLM": ({**LLAMA, **EXPERTS}, (64, 32)),
    "DeepseekV3ForCausalLM": (LATENT, (32, 16)),
}  # fmt: skip
"""The class, its sizes, and bytes that one of 2 and of 4 ranks keeps of a token: those of its key/value heads
(4 heads of 8 values, are 256 bytes with keys and values). Ranks that attend to one head divide its tokens.
(A latent of 16 values is 64 bytes.)"""
FAST = ("LlamaForCausalLM",)


def _stock(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    config = kind.config_class(vocab_size=64, bos_token_id=1, eos_token_id=2, **CLASSES[name][0])
    found: nn.Module = kind(config).eval()
    return found


def _on(ranks: int, model: nn.Module, **config: Any) -> attngraph.Decoder:
    found = attngraph.compile(
        model, cache=attngraph.CacheConfig(**config), mesh=attngraph.SimulatedMesh(tensor=ranks)
    )
    assert isinstance(found, attngraph.Decoder)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CLASSES]
)
def test_a_stock_decoder_on_ranks_gives_the_tokens_of_one_device(name: str, ranks: int) -> None:
    model = _stock(name)
    ids = torch.randint(3, 64, (2, 5))
    ids_of_one = attngraph.compile(model, cache=True).generate(ids, 6)
    decoder = _on(ranks, model)
    assert torch.equal(decoder.generate(ids, 6), ids_of_one)
    cache = decoder.report.cache
    assert cache is not None and cache.bytes_per_token == CLASSES[name][1][ranks // 4]
    assert decoder.prefill(ids)[1].bytes_per_token == ranks * cache.bytes_per_token
    assert cache.ranks is not None
    assert {why for *_, why in cache.ranks.alike} <= {"the heads of every rank attend to it"}
    assert not cache.ranks.alike or attentions_of_one_key_head(decoder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ranks",
    [
        pytest.param("DeepseekV3ForCausalLM", 2),
        pytest.param("LlamaForCausalLM", 4, marks=pytest.mark.slow),
        pytest.param("GemmaForCausalLM", 2, marks=pytest.mark.slow),
    ],
)
def test_a_stock_decoder_on_ranks_that_are_to_divide_tokens(name: str, ranks: int) -> None:
    model = _stock(name)
    ids = torch.randint(3, 64, (2, 5))
    mesh, shard = attngraph.SimulatedMesh(tensor=ranks), attngraph.ShardConfig(cache="tokens")
    decoder = attngraph.compile(model, cache=True, mesh=mesh, shard=shard)
    assert torch.equal(decoder.generate(ids, 6), attngraph.compile(model, cache=True).generate(ids, 6))
    cache = decoder.report.cache
    assert cache is not None and cache.bytes_per_token == CLASSES[name][1][ranks // 4]
    assert cache.ranks is not None and {team for *_, team in cache.ranks.tokens} == {2}
    assert not cache.ranks.alike and not cache.ranks.heads


def attentions_of_one_key_head(decoder: attngraph.Decoder) -> bool:
    """Whether all heads of every attention share one key/value head."""
    return all(entry.kv_heads == 1 for entry in decoder.report.attention)


def _lm(**sizes: Any) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(DecoderLMConfig(**{"width": 32, "heads": 4, "layers": 1, **sizes})).eval()


@pytest.mark.slow
def test_prefill_decode_beams_sampling_and_an_engine_are_those_of_one_device() -> None:
    model = _lm()
    one, two = attngraph.compile(model, cache=True), _on(2, model)
    ids = torch.randint(0, 256, (2, 5))
    both = [decoder.prefill(ids) for decoder in (one, two)]
    torch.testing.assert_close(both[0][0], both[1][0])
    for tokens in (ids[:, 0], ids[:, :3]):
        found = [decoder.decode(tokens, state) for decoder, (_, state) in zip((one, two), both, strict=True)]
        torch.testing.assert_close(*found)
    for state in (both[0][1], both[1][1]):
        state.crop(6)
        state.reorder([1, 0, 1])
    found = [d.decode(ids[[0, 1, 0], 1], state) for d, (_, state) in zip((one, two), both, strict=True)]
    torch.testing.assert_close(*found)
    for options in ({"num_beams": 3}, {"temperature": 1.0, "seed": 3, "top_k": 20}):
        assert torch.equal(one.generate(ids, 5, **options), two.generate(ids, 5, **options))
    told = []
    for decoder in (one, two):
        engine = attngraph.Engine(decoder, max_batch=2, chunk=4)
        requests = [engine.submit(ids[n % 2, : 3 + n], 4) for n in range(3)]
        engine.run()
        told.append([request.result() for request in requests])
    assert told[0] == told[1]


def test_a_state_is_saved_and_loaded_with_the_parts_of_all_simulated_ranks(tmp_path: Any) -> None:
    decoder = _on(2, _lm())
    ids = torch.randint(0, 256, (1, 5))
    _, state = decoder.prefill(ids)
    state.save(tmp_path / "state")
    loaded = attngraph.KVCache.load(tmp_path / "state")
    again = copy.deepcopy(loaded)
    wanted = decoder.decode(ids[:, 0], state)
    assert torch.equal(decoder.decode(ids[:, 0], loaded), wanted)
    again.rank = (1, 2)
    with pytest.raises(attngraph.CacheError, match="rank 1 of 2"):
        decoder.decode(ids[:, 0], again)


def test_a_divided_table_of_positions_still_says_how_long_a_sequence_may_be() -> None:
    model = _lm(max_tokens=64)
    decoder = _on(2, model)
    decoder.prefill(torch.randint(0, 256, (1, 5)))
    report = decoder.report
    assert report.ranks is not None and report.cache is not None
    assert "position_embedding" in {e.name for e in report.ranks.divided}
    assert report.cache.most_tokens == 64
    with pytest.raises(attngraph.CacheError, match="at most 64 fit"):
        decoder.prefill(torch.randint(0, 256, (1, 65)))


def test_weights_that_change_are_seen_by_the_next_step() -> None:
    """Parts of whole parameters are kept between steps, but not beyond a change."""
    model = _lm()
    decoder = _on(2, model)
    ids = torch.randint(0, 256, (1, 5))
    before, _ = decoder.prefill(ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after, _ = decoder.prefill(ids)
    torch.testing.assert_close(after, model(ids))
    assert not torch.allclose(before, after)


@pytest.mark.slow
def test_heads_that_cannot_be_divided_are_kept_by_every_rank_and_told() -> None:
    model = _lm(heads=3, width=24)
    decoder = _on(2, model)
    ids = torch.randint(0, 256, (1, 5))
    assert torch.equal(decoder.generate(ids, 4), attngraph.compile(model, cache=True).generate(ids, 4))
    cache = decoder.report.cache
    assert cache is not None and cache.ranks is not None
    assert cache.ranks.heads == () and len(cache.ranks.alike) == 2
    assert cache.bytes_per_token == cache.expanded == 2 * 24 * 4
    assert "kept by every rank: 2 value(s) of 96 bytes a token" in str(decoder.report)


class Latent(nn.Module):
    """A decoder whose keys and values are projections of 8 numbers a token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.q = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.down, self.up = nn.Linear(32, 8), nn.Linear(8, 64, bias=False)
        self.out, self.head = nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        k, v = self.up(self.down(x)).unflatten(-1, (4, 16)).transpose(1, 2).split(8, -1)
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.head(x + self.out(y.transpose(1, 2).flatten(2)))
        return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_divide_the_tokens_of_a_latent(ranks: int) -> None:
    torch.manual_seed(0)
    model = Latent().eval()
    decoder = _on(ranks, model)
    ids = torch.randint(0, 64, (2, 5))
    assert torch.equal(decoder.generate(ids, 24), attngraph.compile(model, cache=True).generate(ids, 24))
    cache, told = decoder.report.cache, decoder.report.ranks
    assert cache is not None and cache.ranks is not None and told is not None
    assert cache.bytes_per_token == 8 * 4 // ranks and ("heads", 4) in {
        (e.what, e.count) for e in told.divided
    }
    assert [(size, team) for _, size, team in cache.ranks.tokens] == [(8 * 4 // ranks, ranks)]
    assert not cache.ranks.alike and CACHE_EXCHANGE in {sent.what for sent in told.sent}
    assert f"a rank keeps 1 of {ranks} tokens" in str(decoder.report)


def test_a_latent_is_kept_by_every_rank_where_heads_alone_are_divided() -> None:
    torch.manual_seed(0)
    model = Latent().eval()
    mesh = attngraph.SimulatedMesh(tensor=2)
    decoder = attngraph.compile(model, cache=True, mesh=mesh, shard=attngraph.ShardConfig(cache="heads"))
    ids = torch.randint(0, 64, (2, 5))
    assert torch.equal(decoder.generate(ids, 4), attngraph.compile(model, cache=True).generate(ids, 4))
    cache = decoder.report.cache
    assert cache is not None and cache.ranks is not None and cache.bytes_per_token == 8 * 4
    assert [(size, per, why) for _, size, per, why in cache.ranks.alike] == [
        (32, "token", "all heads share it")
    ]


@pytest.mark.slow
def test_a_state_with_divided_tokens_is_arranged_as_any_other() -> None:
    """Rows of other lengths, chunks of a prompt, copies, another order of rows, and tokens taken back."""
    torch.manual_seed(0)
    model = Latent().eval()
    ids = torch.randint(0, 64, (3, 40))
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, :4], mask[2, 7:] = 0, 0
    order = torch.tensor([2, 0, 1])
    found = []
    for decoder in (attngraph.compile(model, cache=True), _on(4, model)):
        steps = []
        with torch.no_grad():
            logits, state = decoder.prefill(ids[:, :9], attention_mask=mask)
            steps.append(logits[mask.bool()])
            steps.append(decoder.decode(ids[:, 9:30], state))
            before = state.copy()
            steps += [decoder.decode(ids[:, t : t + 1], state) for t in range(30, 36)]
            state.crop(20)
            steps.append(decoder.decode(ids[:, 36:38], state))
            before.reorder(order)
            steps += [decoder.decode(ids[order, t : t + 1], before) for t in range(30, 34)]
        found.append(torch.cat([step.flatten(0, -2) for step in steps]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_tokens_that_cannot_be_divided_are_refused_where_asked_for() -> None:
    decoder = attngraph.compile(
        _lm(), cache=True, mesh=attngraph.SimulatedMesh(tensor=2), shard=attngraph.ShardConfig(cache="tokens")
    )
    with pytest.raises(attngraph.NoDecoderError, match="every rank keeps heads of its own"):
        decoder.prefill(torch.randint(0, 256, (1, 5)))
    with pytest.raises(ValueError, match="cache must be"):
        attngraph.ShardConfig(cache="pages")


@pytest.mark.slow
def test_shared_key_heads_are_told() -> None:
    decoder = _on(4, _stock("LlamaForCausalLM"), proof=False)
    decoder.prefill(torch.randint(3, 64, (1, 5)))
    assert "a rank keeps 1 of 2 tokens" in str(decoder.report)
    mesh, shard = attngraph.SimulatedMesh(tensor=4), attngraph.ShardConfig(cache="heads")
    decoder = attngraph.compile(_stock("LlamaForCausalLM"), cache=True, mesh=mesh, shard=shard)
    decoder.prefill(torch.randint(3, 64, (1, 5)))
    assert "1 x a rank keeps 1 of 2 key/value heads; 2 ranks keep the same" in str(decoder.report)


def test_a_decoder_on_ranks_is_not_saved(tmp_path: Any) -> None:
    decoder = _on(2, _lm(), proof=False)
    decoder.prefill(torch.randint(0, 256, (1, 5)))
    with pytest.raises(attngraph.SavedError, match="divided among ranks"):
        decoder.save(tmp_path / "saved")
