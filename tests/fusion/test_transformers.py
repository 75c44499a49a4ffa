"""Stock models of the transformers package, tiny, unmodified, eager attention: every attention fuses, padded
batches on either side answer as eager does, other lengths need no new graph, and results keep their class."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from tests.cache.small import greedy, stirred

transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
CACHE = pytest.importorskip("attngraph.hf").CACHE

B, T = 2, 9
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**WIDTHS, "num_key_value_heads": 2}
HEADED = {**GROUPED, "head_dim": 8}
WINDOWED = {**HEADED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}
STACK = {"n_embd": 32, "n_layer": 2, "n_head": 4}
LATENT = {
    **WIDTHS, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BOTH_SIDES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}  # fmt: skip
PATCHES = {**WIDTHS, "image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "depths": [1, 1], "num_encoder_blocks": 2}
SAMPLES = {
    **WIDTHS, "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
}  # fmt: skip


def ids(tokens: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 60, (B, tokens))}


def pairs(tokens: int) -> dict[str, Tensor]:
    return {**ids(tokens), "decoder_input_ids": torch.randint(3, 60, (B, tokens - 3))}


def boxes(tokens: int) -> dict[str, Tensor]:
    return {**ids(tokens), "bbox": torch.randint(0, 50, (B, tokens, 1)).repeat(1, 1, 4)}


def pixels(_: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, 32, 32)}


def video(_: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 4, 3, 32, 32)}


def spectrum(_: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(B, 24, 16)}


def wave(tokens: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(B, 20 * tokens)}


def sound(tokens: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(B, 8, 20), "decoder_input_ids": torch.randint(3, 60, (B, tokens))}


def speech(tokens: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(B, 40, 8), "decoder_input_ids": torch.randint(3, 60, (B, tokens))}


TEXT = (ids, pairs, boxes)
FIXED = (pixels, video, spectrum)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's class and configuration; how many attentions it has and the words in their masks."""

    model: str
    config: str
    settings: dict[str, Any]
    attentions: int = 2
    words: frozenset[str] = frozenset()
    inputs: Callable[[int], dict[str, Tensor]] = ids

    def build(self) -> torch.nn.Module:
        tokens = TOKENS if self.inputs not in FIXED else {}
        config = getattr(transformers, self.config)(
            **{**tokens, **self.settings}, attn_implementation="eager"
        )
        model: torch.nn.Module = getattr(transformers, self.model)(config)
        return stirred(model)


def causal(name: str, settings: dict[str, Any], *words: str, config: str = "") -> Case:
    return Case(
        f"{name}ForCausalLM", config or f"{name}Config", settings, words=frozenset({"causal", *words})
    )


def encoder(name: str, settings: dict[str, Any], *words: str, attentions: int = 2, config: str = "",
            inputs: Callable[[int], dict[str, Tensor]] = ids) -> Case:  # fmt: skip
    return Case(f"{name}Model", config or f"{name}Config", settings, attentions, frozenset(words), inputs)


def both(name: str, settings: dict[str, Any], *words: str, attentions: int = 6,
         inputs: Callable[[int], dict[str, Tensor]] = pairs) -> Case:  # fmt: skip
    words = ("causal", *words)
    return Case(
        f"{name}ForConditionalGeneration", f"{name}Config", settings, attentions, frozenset(words), inputs
    )


def image(name: str, settings: dict[str, Any] = PATCHES, *, attentions: int = 2,
          inputs: Callable[[int], dict[str, Tensor]] = pixels, config: str = "") -> Case:  # fmt: skip
    return Case(f"{name}Model", config or f"{name}Config", settings, attentions, inputs=inputs)


DECODERS = {
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", STACK, words=frozenset({"causal"})),
    **{name.lower(): causal(name, GROUPED) for name in (
        "Llama", "Qwen2", "Phi3", "Olmo", "Olmo2", "Cohere", "StableLm", "Starcoder2", "Granite",
        "Nemotron", "SmolLM3", "Arcee", "Apertus", "BitNet", "NanoChat"
    )},
    "mistral": causal("Mistral", {**GROUPED, "sliding_window": 4}, "window(4)"),
    **{name.lower(): causal(name, HEADED) for name in (
        "Gemma", "Qwen3", "Glm", "Glm4", "Helium", "Ministral3", "Jais2"
    )},
    "gemma2": causal("Gemma2", WINDOWED, "window(4)"),
    "gemma3": causal("Gemma3", WINDOWED, "window(4)", config="Gemma3TextConfig"),
    "gpt-neox": causal("GPTNeoX", WIDTHS),
    "gpt-neox-japanese": causal("GPTNeoXJapanese", WIDTHS),
    "opt": causal("OPT", {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "word_embed_proj_dim": 32}),
    "bloom": causal("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "qwen2-moe": causal("Qwen2Moe", {**GROUPED, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": causal("Qwen3Moe", {**HEADED, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2}),
    **{name.lower(): causal(name, WIDTHS) for name in ("Phi", "Persimmon", "BioGpt")},
    "phimoe": causal("Phimoe", EXPERTS),
    "gpt-j": causal("GPTJ", {**STACK, "rotary_dim": 4}),
    "codegen": causal("CodeGen", {**STACK, "rotary_dim": 4}),
    "gpt-neo": causal("GPTNeo", {"hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "window_size": 4}, "window(4)"),
    "gpt-bigcode": causal("GPTBigCode", STACK),
    "falcon": causal("Falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "falcon with groups": causal("Falcon", {"hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmo3": causal("Olmo3", {k: v for k, v in WINDOWED.items() if k != "head_dim"}, "window(4)"),
    "olmoe": causal("Olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": causal("Cohere2", WINDOWED, "window(4)"),
    "granite-moe": causal("GraniteMoe", EXPERTS),
    "exaone4": causal("Exaone4", {k: v for k, v in WINDOWED.items() if k != "head_dim"}, "window(4)"),
    "ernie4.5": causal("Ernie4_5", HEADED),
    "hunyuan": causal("HunYuanDenseV1", HEADED),
    "seed-oss": causal("SeedOss", HEADED),
    "mixtral": causal("Mixtral", {**GROUPED, "num_local_experts": 2}),
    "deepseek-v3": causal("DeepseekV3", LATENT),
    "llama4": causal("Llama4", {**EXPERTS, "head_dim": 8, "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 4,
        "no_rope_layers": [1, 0], "moe_layers": [1]}, config="Llama4TextConfig"),
    "ctrl": Case("CTRLLMHeadModel", "CTRLConfig", {**STACK, "dff": 64}, words=frozenset({"causal"})),
    "modernbert decoder": causal("ModernBertDecoder", {**WIDTHS, "local_attention": 8,
        "global_attn_every_n_layers": 2}),
    "bert decoder": Case("BertLMHeadModel", "BertConfig", {**WIDTHS, "is_decoder": True},
        words=frozenset({"causal"})),
    "clip text": encoder("CLIPText", WIDTHS, "causal"),
    "minimax-m2": causal("MiniMaxM2", {**HEADED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "youtu": causal("Youtu", LATENT),
    "minicpm3": causal("MiniCPM3", LATENT),
    "cwm": causal("Cwm", WINDOWED, "window(4)"),
    "flint": causal("Flint", WINDOWED, "window(4)"),
    "beam": causal("Beam", WINDOWED, "window(4)"),
    "solar-open": causal("SolarOpen", {**HEADED, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2}),
    "mpt": causal("Mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "qwen3.5": Case("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**HEADED, "layer_types": ["linear_attention",
        "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8}, attentions=1, words=frozenset({"causal"})),
    "gpt-oss": causal("GptOss", {**WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1}),
}  # fmt: skip
ENCODERS = {
    **{name.lower(): encoder(name, WIDTHS) for name in (
        "Bert", "Roberta", "Camembert", "MPNet", "Ernie", "Splinter", "Gte", "Esmc", "Ultrabert"
    )},
    "roberta-prelayernorm": encoder("RobertaPreLayerNorm", WIDTHS),
    "xlm-roberta": encoder("XLMRoberta", WIDTHS),
    "xlm-roberta-xl": encoder("XLMRobertaXL", WIDTHS),
    "distilbert": encoder("DistilBert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "electra": encoder("Electra", {**WIDTHS, "embedding_size": 16}),
    "albert": encoder("Albert", {**WIDTHS, "embedding_size": 16}),
    "squeezebert": encoder("SqueezeBert", {**WIDTHS, "embedding_size": 32, "q_groups": 2, "k_groups": 2,
        "v_groups": 2, "output_groups": 2}),
    "mobilebert": encoder("MobileBert", {**WIDTHS, "embedding_size": 16, "intra_bottleneck_size": 16,
        "true_hidden_size": 16}),
    "megatron-bert": encoder("MegatronBert", WIDTHS),
    "rembert": encoder("RemBert", {**WIDTHS, "input_embedding_size": 16, "output_embedding_size": 16}),
    "roformer": encoder("RoFormer", {**WIDTHS, "embedding_size": 32}),
    "data2vec text": encoder("Data2VecText", WIDTHS),
    "esm": encoder("Esm", {**WIDTHS, "position_embedding_type": "rotary", "mask_token_id": 3}),
    "big bird": encoder("BigBird", {**WIDTHS, "attention_type": "original_full"}),
    "modernbert": encoder("ModernBert", {**WIDTHS, "local_attention": 8, "global_attn_every_n_layers": 2}),
    "nomic-bert": encoder("NomicBert", WIDTHS),
    "layoutlm": encoder("LayoutLM", WIDTHS, inputs=boxes),
    "chinese-clip text": encoder("ChineseCLIPText", WIDTHS),
    "siglip text": encoder("SiglipText", WIDTHS),
    "deberta-v2": encoder("DebertaV2", {**WIDTHS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4, "max_relative_positions": 8}),
    "i-bert": encoder("IBert", WIDTHS),
    "luke": encoder("Luke", {**WIDTHS, "entity_vocab_size": 16, "entity_emb_size": 16}),
    "visual-bert": encoder("VisualBert", {**WIDTHS, "visual_embedding_dim": 16}),
    "xlnet": Case("XLNetModel", "XLNetConfig", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
}  # fmt: skip
ENCODER_DECODERS = {
    **{name.lower(): both(name, T5) for name in ("T5", "MT5", "UMT5")},
    **{name.lower(): both(name, BOTH_SIDES) for name in (
        "Bart", "MBart", "Pegasus", "Blenderbot", "PLBart", "Mvp"
    )},
    "blenderbot-small": both("BlenderbotSmall", BOTH_SIDES),
    "m2m-100": both("M2M100", BOTH_SIDES),
    "nllb-moe": both("NllbMoe", {**BOTH_SIDES, "num_experts": 4}),
    "pegasus-x": both("PegasusX", {**BOTH_SIDES, "block_size": 8, "num_global_tokens": 3}, attentions=7),
    "marian": Case("MarianMTModel", "MarianConfig", BOTH_SIDES, 6, frozenset({"causal"}), pairs),
    "whisper": both("Whisper", {**BOTH_SIDES, "num_mel_bins": 8, "max_source_positions": 10,
        "max_target_positions": 20}, inputs=sound),
    "speech-to-text": both("Speech2Text", {**BOTH_SIDES, "input_feat_per_channel": 8, "conv_channels": 16,
        "num_conv_layers": 2, "max_target_positions": 20}, inputs=speech),
}  # fmt: skip
IMAGES = {
    **{name.lower(): image(name) for name in ("ViT", "DeiT", "Beit", "Dinov2", "Sapiens2")},
    "beit with relative positions": image("Beit", {**PATCHES, "use_relative_position_bias": True}),
    "dinov3": image("DINOv3ViT"),
    "vit-msn": image("ViTMSN"),
    "mlcd": image("MLCDVision"),
    "vitdet": image("VitDet", {**PATCHES, "pretrain_image_size": 32}),
    "yolos": image("Yolos", {**PATCHES, "image_size": [32, 32], "num_detection_tokens": 3}),
    "clip vision": image("CLIPVision"),
    "blip vision": image("BlipVision"),
    "segformer": image("Segformer", {**STAGES, "patch_sizes": [3, 3], "strides": [4, 2], "sr_ratios": [2, 1],
        "mlp_ratios": [2, 2]}),
    "pvt": image("Pvt", {**STAGES, "image_size": 32, "patch_sizes": [4, 2], "strides": [4, 2],
        "sequence_reduction_ratios": [2, 1], "mlp_ratios": [2, 2]}),
    "videomae": image("VideoMAE", {**PATCHES, "num_frames": 4}, inputs=video),
    "swin": image("Swin", {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1],
        "num_heads": [2, 4], "window_size": 4}, attentions=3),
    "timesformer": image("Timesformer", {**PATCHES, "num_frames": 4}, attentions=4, inputs=video),
    "vivit": image("Vivit", {**PATCHES, "num_frames": 4, "tubelet_size": [2, 8, 8]}, inputs=video),
    "imagegpt": Case("ImageGPTModel", "ImageGPTConfig", {**STACK, "vocab_size": 64},
        words=frozenset({"causal"})),
}  # fmt: skip
SOUNDS = {
    "wav2vec2": image("Wav2Vec2", SAMPLES, inputs=wave),
    "hubert": image("Hubert", SAMPLES, inputs=wave),
    "unispeech-sat": image("UniSpeechSat", SAMPLES, inputs=wave),
    "wav2vec2 conformer": image("Wav2Vec2Conformer", {**SAMPLES, "position_embeddings_type": "relative",
        "conv_depthwise_kernel_size": 3}, inputs=wave),
    "unispeech": image("UniSpeech", SAMPLES, inputs=wave),
    "wavlm": image("WavLM", {**SAMPLES, "num_buckets": 8, "max_bucket_distance": 16}, inputs=wave),
    "data2vec audio": image("Data2VecAudio", {**SAMPLES, "conv_pos_kernel_size": 3}, inputs=wave),
    "ast": image("AST", {**WIDTHS, "max_length": 24, "num_mel_bins": 16, "patch_size": 8,
        "frequency_stride": 8, "time_stride": 8}, inputs=spectrum),
}  # fmt: skip
CASES = DECODERS | ENCODERS | ENCODER_DECODERS | IMAGES | SOUNDS

FAST = {"mistral"}
LENGTHS = (T, 12, 7)
PADDING_IN_THE_BIAS = {"deberta-v2", "xlnet"}
NUMBERS_FOR_SIZES = {"pegasus-x"}
"""Models that count blocks: each number of them takes a graph of its own."""
LEFT = torch.tensor([[1] * T, [0] * 3 + [1] * (T - 3)])
RIGHT = torch.tensor([[1] * (T - 3) + [0] * 3, [1] * T])


def marked(names: Iterable[str]) -> list[Any]:
    return [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", marked(CASES))
def test_a_stock_model_fuses_and_answers_as_eager_does(name: str, compare: Callable[..., Any]) -> None:
    case = CASES[name]
    model = case.build()
    compiled = attngraph.compile(model)
    lengths = LENGTHS if case.inputs in (*TEXT, wave) and name not in NUMBERS_FOR_SIZES else (T,)
    calls = [case.inputs(tokens) for tokens in lengths]
    if case.inputs in TEXT:
        calls += [{**calls[0], "attention_mask": mask} for mask in (LEFT, RIGHT)]
    with torch.no_grad():
        for place, call in enumerate(calls):
            agreement = compare(model, compiled, (), call, tolerance=2e-5)
            assert agreement, (place, list(call), agreement.differences)
            assert type(compiled(**call)) is type(model(**call))
            report = compiled.report
            assert name in NUMBERS_FOR_SIZES or report.graphs == (2 if "attention_mask" in call else 1)
            assert len(report.attention) == case.attentions, report.missed
            masks = [a.mask.split(" (")[0].split(" & ") for a in report.attention]
            assert case.words <= {word for words in masks for word in words}
            if "attention_mask" in call and case.inputs is ids and name not in PADDING_IN_THE_BIAS:
                assert all("padding" in a.mask for a in report.attention)
    assert not compiled.report.breaks


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
    cache = mine[CACHE]
    assert type(cache) is type(theirs[CACHE])
    assert cache.get_seq_length() == T
    assert type(cache.layers[0].keys) is Tensor
    with torch.no_grad():
        step = {"input_ids": torch.tensor([[5], [6]])}
        first = model(**step, **{CACHE: cache})
    assert first.logits.shape == (B, 1, 64)


@pytest.mark.slow
def test_a_cache_given_as_an_argument_is_extended_as_eager_extends_it(
    gpt2: tuple[torch.nn.Module, attngraph.CompiledModule],
) -> None:
    prompt, step = ids(T)["input_ids"], torch.tensor([[5], [6]])
    results = []
    with torch.no_grad():
        for model in gpt2:
            cache = model(prompt, use_cache=True)[CACHE]
            logits = model(step, **{CACHE: cache}, use_cache=True).logits
            results.append((logits, cache.get_seq_length()))
    assert results[0][1] == results[1][1] == T + 1
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)


@pytest.mark.slow
def test_plain_tuples_come_back_as_tuples(gpt2: tuple[torch.nn.Module, attngraph.CompiledModule]) -> None:
    given = ids(T)
    with torch.no_grad():
        mine, theirs = (m(**given, return_dict=False, use_cache=False) for m in gpt2)
    assert type(mine) is type(theirs) is tuple
    assert torch.allclose(mine[0], theirs[0], atol=1e-5)


@pytest.mark.slow
def test_a_loss_is_computed_and_flows_back(gpt2: tuple[torch.nn.Module, attngraph.CompiledModule]) -> None:
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
    calls = (lambda ids, of=of: of(ids, use_cache=False).logits for of in (model, compiled))
    assert torch.equal(*(greedy(call, torch.tensor([[5, 9, 3]]), 8) for call in calls))
    assert compiled.report.graphs == 1
