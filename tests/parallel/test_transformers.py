"""Stock classes of transformers, unmodified, on simulated ranks: answers and gradients of one device, and two
sums over ranks in a layer (one where attention and MLP stand side by side)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attngraph.report.ranks import RanksEntry

transformers: Any = pytest.importorskip("transformers")
Compared = Callable[..., RanksEntry]

LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0,
}  # fmt: skip
BERT = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 40,
}  # fmt: skip
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32}
FALCON = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64}
CLASSES: dict[str, tuple[dict[str, Any], int]] = {
    "GPT2LMHeadModel": (GPT2, 5),
    "LlamaForCausalLM": (LLAMA, 5),
    "GPTNeoXForCausalLM": ({**BERT, "rotary_pct": 0.5}, 3),
    "BloomForCausalLM": ({"n_layer": 2, "hidden_size": 32, "n_head": 4}, 5),
    "OPTForCausalLM": ({**BERT, "ffn_dim": 64, "word_embed_proj_dim": 32}, 5),
    "MptForCausalLM": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}, 5),
    "FalconForCausalLM": (FALCON, 3),
    "MistralForCausalLM": ({**LLAMA, "sliding_window": 3}, 5),
    "Qwen2ForCausalLM": (LLAMA, 5),
    "Qwen3ForCausalLM": ({**LLAMA, "head_dim": 8}, 5),
    "GemmaForCausalLM": ({**LLAMA, "head_dim": 8, "num_key_value_heads": 1}, 5),
    "Gemma2ForCausalLM": ({**LLAMA, "head_dim": 8}, 5),
    "PhiForCausalLM": ({**LLAMA, "num_key_value_heads": 4}, 3),
    "Phi3ForCausalLM": (LLAMA, 5),
    "OlmoForCausalLM": (LLAMA, 5),
    "Olmo2ForCausalLM": (LLAMA, 5),
    "CohereForCausalLM": ({**LLAMA, "use_qk_norm": True}, 3),
    "StableLmForCausalLM": ({**LLAMA, "qk_layernorm": True}, 5),
    "GraniteForCausalLM": (LLAMA, 5),
    "Starcoder2ForCausalLM": (LLAMA, 5),
    "GlmForCausalLM": ({**LLAMA, "head_dim": 8}, 5),
    "NemotronForCausalLM": (LLAMA, 5),
    "PersimmonForCausalLM": ({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, 5),
    "SmolLM3ForCausalLM": (LLAMA, 5),
    "MixtralForCausalLM": ({**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, 5),
    "GptOssForCausalLM": (
        {**LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}, 5),
    "GPTJForCausalLM": ({**GPT2, "rotary_dim": 4}, 3),
    "GPTNeoForCausalLM": (
        {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "window_size": 4, "max_position_embeddings": 32}, 5),
    "CodeGenForCausalLM": ({**GPT2, "rotary_dim": 4}, 3),
    "GPTBigCodeForCausalLM": (GPT2, 5),
    "BioGptForCausalLM": (BERT, 5),
    "XGLMForCausalLM": (
        {"num_layers": 2, "d_model": 32, "attention_heads": 4, "ffn_dim": 64,
         "max_position_embeddings": 32}, 5),
    "BertForMaskedLM": (BERT, 5),
    "RobertaForMaskedLM": (BERT, 5),
    "ElectraForMaskedLM": ({**BERT, "embedding_size": 16}, 5),
    "AlbertForMaskedLM": ({**BERT, "embedding_size": 16}, 5),
    "DistilBertForMaskedLM": (
        {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 32}, 5),
    "CLIPTextModel": (BERT, 5),
    "T5EncoderModel": ({**T5, "num_layers": 2}, 5),
    "T5ForConditionalGeneration": ({**T5, "num_layers": 1, "feed_forward_proj": "gated-gelu"}, 7),
    "BartForConditionalGeneration": (
        {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "max_position_embeddings": 32}, 7),
    "DeepseekV2ForCausalLM": (
        {**LLAMA, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1,
         "topk_group": 1}, 5),
}  # fmt: skip
"""The class, its sizes, and how many sums over ranks its graph has."""
FAST = ("GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM", "FalconForCausalLM")
WITHOUT_GRADIENTS = ("BloomForCausalLM", "DeepseekV2ForCausalLM")
"""They define a gradient themselves in training, or their absorbed form has none."""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CLASSES]
)
def test_a_stock_class_on_ranks_is_the_class(same_on_ranks: Compared, name: str, ranks: int) -> None:
    if ranks == 2 and name in FAST:
        pytest.skip("with four ranks")
    sizes, sums = CLASSES[name]
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    config = kind.config_class(vocab_size=64, bos_token_id=1, eos_token_id=2, **sizes)
    model = kind(config).eval()
    ids = torch.randint(3, 64, (2, 7))
    kwargs: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
    if getattr(config, "is_encoder_decoder", False) and "Encoder" not in name:
        kwargs["decoder_input_ids"] = ids
    entry = same_on_ranks(model, ranks, ids, gradients=name not in WITHOUT_GRADIENTS, wide=False, **kwargs)
    assert len([s for s in entry.sent if s.what == "all-reduce"]) == sums
    told = {n: size for n, size, _ in entry.whole}
    everything, held = entry.parameters
    small = 2000  # norms, biases, tables of a few rows
    assert held <= (everything - sum(told.values())) / ranks + sum(told.values()) + small
