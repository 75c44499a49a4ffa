"""Stock transformers models, unmodified, as decoders: the tokens of transformers' own `generate`, padded
batches on either side, beams, encoder-decoders; convolutions, state spaces and loops over tokens too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from tests.cache.small import by_steps

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")

NEW = 24
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
GROUPED = {**WIDTHS, "num_key_value_heads": 2}
HEADED = {**GROUPED, "head_dim": 8}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWED = {**HEADED, **LAYERS, "sliding_window": 4}
STACK = {"n_embd": 32, "n_layer": 1, "n_head": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
MAMBA2 = {
    "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **WIDTHS, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 0,
}  # fmt: skip
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", STACK),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", WINDOWED),
    "BloomForCausalLM": ("BloomConfig", {"hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "GptOssForCausalLM": ("GptOssConfig", {**WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 2}),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", HEADED),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**HEADED, **MOE}),
    "GemmaForCausalLM": ("GemmaConfig", HEADED),
    "Gemma2ForCausalLM": ("Gemma2Config", WINDOWED),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", WIDTHS),
    "GPTJForCausalLM": ("GPTJConfig", {**STACK, "rotary_dim": 4}),
    "OPTForCausalLM": (
        "OPTConfig",
        {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "word_embed_proj_dim": 32},
    ),
    "MptForCausalLM": ("MptConfig", {"d_model": 32, "n_layers": 1, "n_heads": 4}),
    "FalconForCausalLM": (
        "FalconConfig", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    ),
    "PhiForCausalLM": ("PhiConfig", WIDTHS),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "Olmo2ForCausalLM": ("Olmo2Config", GROUPED),
    "CohereForCausalLM": ("CohereConfig", GROUPED),
    "StableLmForCausalLM": ("StableLmConfig", GROUPED),
    "Starcoder2ForCausalLM": ("Starcoder2Config", GROUPED),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", STACK),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "window_size": 4},
    ),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", LATENT),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", LATENT),
    "MiniCPM3ForCausalLM": ("MiniCPM3Config", LATENT),
    "YoutuForCausalLM": ("YoutuConfig", LATENT),
    "Glm4MoeLiteForCausalLM": ("Glm4MoeLiteConfig", LATENT),
    "BertLMHeadModel": ("BertConfig", {**WIDTHS, "is_decoder": True}),
    "CTRLLMHeadModel": ("CTRLConfig", {**STACK, "dff": 64}),
}  # fmt: skip
QUICK = ("GPT2LMHeadModel", "LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM")
LINEAR = ["linear_attention", "full_attention"]
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Lfm2ForCausalLM": ("Lfm2Config", {
        **GROUPED, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
                                         "time_step_rank": 4}),
    "Mamba2ForCausalLM": ("Mamba2Config", {**MAMBA2, "chunk_size": 8}),
    "Mamba2ForCausalLM, of chunks longer than the prompt": ("Mamba2Config", MAMBA2),
    "JambaForCausalLM": ("JambaConfig", {
        **GROUPED, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1,
        "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", {
        **GROUPED, **MOE, "head_dim": 16, "num_hidden_layers": 2, "layer_types": LINEAR,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16}),
    "MiniMaxForCausalLM": ("MiniMaxConfig", {
        **HEADED, "num_hidden_layers": 2, "layer_types": LINEAR, "block_size": 8, "num_local_experts": 2}),
    "RwkvForCausalLM": ("RwkvConfig", {
        "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64, "rescale_every": 1}),
    "RecurrentGemmaForCausalLM": ("RecurrentGemmaConfig", {
        **GROUPED, "num_hidden_layers": 2, "lru_width": 32, "attention_window_size": 24,
        "block_types": ["recurrent", "attention"]}),
}  # fmt: skip
"""Their own padded batches are none of sequences without padding. `generate` gives RWKV the state and all
tokens again, unless it keeps none."""
BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    "T5ForConditionalGeneration": ("T5Config", T5),
    "BartForConditionalGeneration": ("BartConfig", BART),
    "MBartForConditionalGeneration": ("MBartConfig", BART),
    "PegasusForConditionalGeneration": ("PegasusConfig", BART),
}


def build(name: str, config: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    made = getattr(transformers, config)(**{**TOKENS, **settings})
    made._attn_implementation = "eager"
    model: Any = getattr(transformers, name.split(",")[0])(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2 if parameter.ndim > 1 else 0.1)
    own = model.generation_config
    own.eos_token_id = own.forced_bos_token_id = own.forced_eos_token_id = None
    own.pad_token_id, own.decoder_start_token_id = 0, 1
    return model


def theirs(model: Any, new: int = NEW, **inputs: Any) -> Tensor:
    found: Tensor = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return found


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*DECODERS, *RECURRENT)]
)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    model = build(name, *(DECODERS | RECURRENT)[name])
    decoder, ids = attngraph.compile(model, cache=True), torch.randint(3, 60, (2, 7))
    cached = {} if "Rwkv" not in name else {"use_cache": False}
    everything = torch.ones_like(ids)
    assert torch.equal(
        decoder.generate(ids, NEW), theirs(model, input_ids=ids, attention_mask=everything, **cached)
    )
    mask = torch.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    padded = decoder.generate(ids, NEW, attention_mask=mask)
    if name in RECURRENT:
        alone = [decoder.generate(row, NEW)[:, -NEW:] for row in (ids[:1, 3:], ids[1:])]
        assert torch.equal(padded[:, 7:], torch.cat(alone))
    else:
        assert torch.equal(padded, theirs(model, input_ids=ids, attention_mask=mask))
    right, flipped = ids.clone(), mask.clone()
    right[0], flipped[0] = ids[0].roll(-3), mask[0].roll(-3)
    assert torch.equal(decoder.generate(right, NEW, attention_mask=flipped)[:, 7:], padded[:, 7:])
    # Decays that stand in tables of the model's own dtype are proved to the rounding of their entries.
    notes = [note for record in decoder.report.passes for note in record.notes]
    bound = 1e-6 if any("tables are exact (they are rounded)" in note for note in notes) else 1e-10
    assert decoder.report.cache is not None and (decoder.report.cache.error or 1.0) < bound


LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2": ("DeepseekV2ForCausalLM", {}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", {}),
    "DeepseekV2, queries at once": ("DeepseekV2ForCausalLM", {"q_lora_rank": None}),
    "DeepseekV3, pairs half a head apart": ("DeepseekV3ForCausalLM", {"rope_interleave": False}),
    "DeepseekV3, one group of experts": ("DeepseekV3ForCausalLM", {"n_group": 1}),
    "MiniCPM3": ("MiniCPM3ForCausalLM", {}),
    "Youtu": ("YoutuForCausalLM", {}),
    "Glm4MoeLite": ("Glm4MoeLiteForCausalLM", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("absorb", ["auto", "always", "never", "fold"])
@pytest.mark.parametrize("name", LATENT_MODELS)
def test_latent_attention_keeps_the_latent_and_gives_the_tokens_of_transformers(
    name: str, absorb: str
) -> None:
    which, settings = LATENT_MODELS[name]
    config, base = DECODERS[which]
    model = build(which, config, {**base, **settings})
    decoder = attngraph.compile(model, cache=True, absorb=absorb)
    ids = torch.randint(3, 60, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    found = decoder.generate(ids, NEW, attention_mask=mask)
    assert torch.equal(found, theirs(model, input_ids=ids, attention_mask=mask))
    report = decoder.report
    assert report.cache is not None
    if absorb == "never":
        assert all(entry.latent is None for entry in report.attention)
        return
    assert [entry.latent.width for entry in report.attention if entry.latent] == [16 + 8]
    assert report.cache.bytes_per_token == (16 + 8) * 4
    assert report.cache.expanded == 4 * (8 + 8 + 8) * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_encoder_decoders_generate(name: str) -> None:
    model = build(name, *BOTH[name])
    decoder = attngraph.compile(model, cache=True)
    source, start = torch.randint(3, 60, (2, 9)), torch.ones(2, 1, dtype=torch.int64)
    mask = torch.ones_like(source)
    mask[0, 6:] = 0
    found = decoder.generate(start, NEW, input_ids=source, attention_mask=mask)
    assert torch.equal(found, theirs(model, input_ids=source, attention_mask=mask))
    beams = decoder.generate(start, 20, num_beams=3, input_ids=source, attention_mask=mask)
    wanted = theirs(model, 20, input_ids=source, attention_mask=mask, num_beams=3)
    assert torch.equal(beams, wanted)
    cache = decoder.report.cache
    assert cache is not None
    assert cache.fixed >= 2, "keys and values of the source are computed once"
    with pytest.raises(attngraph.CaptureError, match="input_ids"):
        decoder.prefill(start)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beams_are_those_of_transformers(layout: str, penalty: float) -> None:
    model = build("GPT2LMHeadModel", *DECODERS["GPT2LMHeadModel"])
    decoder = attngraph.compile(model, cache=attngraph.CacheConfig(layout=layout, page=4))
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(3, 60, (2, 5))
        for end in (None, 11):
            options = {"num_beams": 4, "eos_token_id": end, "length_penalty": penalty, "pad_token_id": 63}
            found, wanted = decoder.generate(ids, 16, **options), theirs(model, 16, input_ids=ids, **options)
            assert torch.equal(found, wanted), (seed, end)


@pytest.mark.slow
def test_positions_that_count_the_tokens_before_them_have_a_decoder() -> None:
    model = build("M2M100ForConditionalGeneration", "M2M100Config", BART)
    decoder = attngraph.compile(model, cache=True)
    source, target = torch.randint(3, 60, (2, 9)), torch.randint(3, 60, (2, 8))
    target[0, 4] = model.config.pad_token_id  # is not counted
    with torch.no_grad():
        wanted = model(input_ids=source, decoder_input_ids=target).logits
    found, _ = by_steps(decoder, target, 3, input_ids=source)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    start = torch.ones(2, 1, dtype=torch.int64)
    assert torch.equal(decoder.generate(start, NEW, input_ids=source), theirs(model, input_ids=source))


def test_a_static_encoder_has_no_decoder() -> None:
    made = transformers.BertConfig(**{**TOKENS, **WIDTHS}, attn_implementation="eager")
    model = transformers.BertForMaskedLM(made).eval()
    with pytest.raises(attngraph.NoDecoderError, match=r"sees later tokens.*Token 0 sees token 1"):
        attngraph.compile(model, cache=True).prefill(torch.randint(3, 60, (1, 5)))
