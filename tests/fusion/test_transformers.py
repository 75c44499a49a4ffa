"""Stock models of the transformers package, tiny, unmodified, eager attention: every attention fuses, padded
batches on either side answer as eager does, and results keep their class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")

B, T = 2, 9
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**WIDTHS, "num_key_value_heads": 2}
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH_SIDES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}


def ids(tokens: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 60, (B, tokens))}


def pairs(tokens: int) -> dict[str, Tensor]:
    return {**ids(tokens), "decoder_input_ids": torch.randint(3, 60, (B, tokens - 3))}


def pixels(_: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, 32, 32)}


def sound(tokens: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(B, 8, 20), "decoder_input_ids": torch.randint(3, 60, (B, tokens))}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's class and configuration; how many attentions it has and the words in their masks."""

    model: str
    config: str
    settings: dict[str, Any]
    attentions: int = 2
    words: frozenset[str] = frozenset({"causal"})
    inputs: Callable[[int], dict[str, Tensor]] = ids
    fused: int | None = None  # where not all of them fuse so far

    def build(self) -> torch.nn.Module:
        tokens = {} if self.inputs is pixels else TOKENS
        config = getattr(transformers, self.config)(**tokens, **self.settings, attn_implementation="eager")
        model: torch.nn.Module = getattr(transformers, self.model)(config)
        return model.eval()


def causal(name: str, settings: dict[str, Any], *words: str, fused: int | None = None) -> Case:
    return Case(
        f"{name}ForCausalLM", f"{name}Config", settings, words=frozenset({"causal", *words}), fused=fused
    )


def encoder(name: str, settings: dict[str, Any]) -> Case:
    return Case(f"{name}Model", f"{name}Config", settings, words=frozenset())


CASES = {
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 4}),
    "llama": causal("Llama", GROUPED),
    "mistral": causal("Mistral", {**GROUPED, "sliding_window": 4}, "window(4)"),
    "gemma2": causal("Gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 4}, "window(4)"),
    "bert": encoder("Bert", WIDTHS),
    "t5": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        6,
        inputs=pairs,
    ),
    "vit": Case(
        "ViTModel",
        "ViTConfig",
        {**WIDTHS, "image_size": 32, "patch_size": 8},
        words=frozenset(),
        inputs=pixels,
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 4},
        words=frozenset({"causal", "window(4)"}),
    ),
    "gpt-neox": causal("GPTNeoX", WIDTHS),
    "opt": causal(
        "OPT",
        {
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
        },
    ),
    "bloom": causal("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "qwen2": causal("Qwen2", GROUPED),
    "qwen3": causal("Qwen3", {**GROUPED, "head_dim": 8}),
    "phi": causal("Phi", WIDTHS),
    "phi3": causal("Phi3", GROUPED),
    "bart": Case("BartForConditionalGeneration", "BartConfig", BOTH_SIDES, 6, inputs=pairs),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BOTH_SIDES, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20},
        6,
        inputs=sound,
    ),
    "roberta": encoder("Roberta", WIDTHS),
    "distilbert": encoder("DistilBert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "deberta-v2": encoder(
        "DebertaV2",
        {
            **WIDTHS,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 4,
            "max_relative_positions": 8,
        },
    ),
    "gpt-j": causal("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "gpt-neo": causal(
        "GPTNeo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        "window(4)",
    ),
    "falcon": causal("Falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "olmo2": causal("Olmo2", GROUPED),
    "cohere": causal("Cohere", GROUPED),
    "stablelm": causal("StableLm", GROUPED),
    "starcoder2": causal("Starcoder2", GROUPED),
    "mixtral": causal("Mixtral", {**GROUPED, "num_local_experts": 2}),
    "deepseek-v3": causal(
        "DeepseekV3",
        {
            **WIDTHS,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
    ),
    "mpt": causal("Mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "gpt-oss": causal(
        "GptOss",
        {**GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
    ),
}
NOT_ALL_FUSED = {
    "mpt": "the scores are no product of a query side and a key side over a shared dimension",
    "gpt-oss": "a sink as an extra column of the scores",
}
FAST = {"mistral"}
LEFT = torch.tensor([[1] * T, [0] * 3 + [1] * (T - 3)])
RIGHT = torch.tensor([[1] * (T - 3) + [0] * 3, [1] * T])


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_a_stock_model_fuses_and_answers_as_eager_does(name: str, compare: Callable[..., Any]) -> None:
    case = CASES[name]
    model = case.build()
    compiled = attngraph.compile(model)
    inputs = case.inputs(T)
    padded = "input_ids" in inputs
    variants: list[dict[str, Tensor]] = [{}, *({"attention_mask": m} for m in (LEFT, RIGHT) if padded)]
    with torch.no_grad():
        for variant in variants:
            named = {**inputs, **variant}
            agreement = compare(model, compiled, (), named, tolerance=2e-5)
            assert agreement, (list(variant), agreement.differences)
            result = compiled(**named)
            assert type(result) is type(model(**named))
            attentions = compiled.report.attention
            if name not in NOT_ALL_FUSED:
                assert len(attentions) == case.attentions, compiled.report.missed
                assert case.words <= {w for a in attentions for w in a.mask.split(" (")[0].split(" & ")}
                assert all(
                    "padding" in a.mask for a in attentions if variant and case.inputs is ids
                ) or name in ("deberta-v2",)
    assert not compiled.report.breaks
    if name in NOT_ALL_FUSED:
        assert any(m.reason and m.source for m in compiled.report.missed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CASES) - {"vit", "whisper"}))
def test_one_graph_serves_other_lengths(name: str, compare: Callable[..., Any]) -> None:
    model = CASES[name].build()
    compiled = attngraph.compile(model)
    with torch.no_grad():
        for tokens in (T, 12, 7):
            agreement = compare(model, compiled, (), CASES[name].inputs(tokens), tolerance=2e-5)
            assert agreement, (tokens, agreement.differences)
    assert compiled.report.graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_training_gives_the_gradients_of_eager(name: str, compare: Callable[..., Any]) -> None:
    model = CASES[name].build()
    compiled = attngraph.compile(model)
    inputs = CASES[name].inputs(T)
    agreement = compare(model, compiled, (), {**inputs, "attention_mask": RIGHT}, tolerance=2e-5)
    assert agreement, agreement.differences
    assert len(compiled.report.attention) == CASES[name].attentions


@pytest.fixture(scope="module")
def gpt2() -> tuple[torch.nn.Module, attngraph.CompiledModule]:
    torch.manual_seed(0)
    model = CASES["gpt2"].build()
    return model, attngraph.compile(model)


def test_results_keep_their_class_and_their_cache(
    gpt2: tuple[torch.nn.Module, attngraph.CompiledModule], compare: Callable[..., Any]
) -> None:
    model, _ = gpt2
    with torch.no_grad():
        mine, theirs = (m(**ids(T), use_cache=True) for m in gpt2)
    assert type(mine) is type(theirs)
    assert list(mine.keys()) == list(theirs.keys())
    assert mine["logits"] is mine.logits is mine[0]
    cache = mine.past_key_values
    assert type(cache) is type(theirs.past_key_values)
    assert cache.get_seq_length() == T
    assert type(cache.layers[0].keys) is Tensor
    with torch.no_grad():
        step = {"input_ids": torch.tensor([[5], [6]])}
        first = model(**step, past_key_values=cache)
    assert first.logits.shape == (B, 1, 64)


@pytest.mark.slow
def test_a_cache_given_as_an_argument_is_extended_as_eager_extends_it(
    gpt2: tuple[torch.nn.Module, attngraph.CompiledModule],
) -> None:
    prompt, step = ids(T)["input_ids"], torch.tensor([[5], [6]])
    results = []
    with torch.no_grad():
        for model in gpt2:
            cache = model(prompt, use_cache=True).past_key_values
            logits = model(step, past_key_values=cache, use_cache=True).logits
            results.append((logits, cache.get_seq_length()))
    assert results[0][1] == results[1][1] == T + 1
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)


@pytest.mark.slow
def test_plain_tuples_come_back_as_tuples(
    gpt2: tuple[torch.nn.Module, attngraph.CompiledModule],
) -> None:
    given = ids(T)
    with torch.no_grad():
        mine, theirs = (m(**given, return_dict=False, use_cache=False) for m in gpt2)
    assert type(mine) is type(theirs) is tuple
    assert torch.allclose(mine[0], theirs[0], atol=1e-5)


@pytest.mark.slow
def test_a_loss_is_computed_and_flows_back(
    gpt2: tuple[torch.nn.Module, attngraph.CompiledModule],
) -> None:
    given = ids(T)
    losses = [m(**given, labels=given["input_ids"], use_cache=False).loss for m in gpt2]
    assert torch.allclose(losses[0], losses[1], atol=1e-5)
    losses[1].backward()
    assert all(p.grad is not None for p in gpt2[0].parameters())


@pytest.mark.slow
def test_asking_for_the_weights_keeps_them_right_and_says_so(
    gpt2: tuple[torch.nn.Module, attngraph.CompiledModule], compare: Callable[..., Any]
) -> None:
    model, _ = gpt2
    compiled = attngraph.compile(model)
    with torch.no_grad():
        agreement = compare(model, compiled, (), {**ids(T), "output_attentions": True}, tolerance=2e-5)
    assert agreement, agreement.differences
    assert len(compiled.report.missed) == 2
    assert all("weights are also used" in m.reason for m in compiled.report.missed)


@pytest.mark.slow
def test_greedy_decoding_without_a_cache_gives_the_tokens_of_eager() -> None:
    model = CASES["llama"].build()
    compiled = attngraph.compile(model)
    found = []
    for one in (model, compiled):
        tokens = torch.tensor([[5, 9, 3]])
        with torch.no_grad():
            for _ in range(8):
                logits = one(tokens, use_cache=False).logits
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        found.append(tokens)
    assert torch.equal(*found)
    assert compiled.report.graphs == 1
