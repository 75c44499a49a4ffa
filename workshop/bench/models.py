"""Language models of transformers with random weights, at real size and tiny."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_NO_TOKENS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


def gpt2(positions: int = 1024, layers: int = 12) -> Any:
    """GPT-2 at real size: 124M parameters with 12 layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _ready(GPT2LMHeadModel(GPT2Config(n_positions=positions, n_layer=layers)))


def llama(layers: int = 12) -> Any:
    """A Llama of 100M parameters: 12 layers of width 768, 12 heads over 4 key heads, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _ready(LlamaForCausalLM(LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True,
    )))  # fmt: skip


def tiny_llama() -> Any:
    """As small as it can be, to see that everything runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _ready(LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )))  # fmt: skip


def small_gpt2() -> Any:
    """Two narrow layers, wide enough for scales of 8 and 4 bits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _ready(GPT2LMHeadModel(GPT2Config(
        vocab_size=200, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0,
    )))  # fmt: skip


def mamba2(width: int = 768, layers: int = 24, vocabulary: int = 32000) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    head = min(64, width // 2)
    return Mamba2ForCausalLM(Mamba2Config(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_heads=2 * width // head,
        head_dim=head, state_size=head, n_groups=1, **_NO_TOKENS,
    ))  # fmt: skip


def lfm2(width: int = 768, layers: int = 24, vocabulary: int = 32000) -> Any:
    """Convolutions, and attention in every third layer."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["full_attention" if layer % 3 == 1 else "conv" for layer in range(max(layers // 2, 3))]
    return Lfm2ForCausalLM(Lfm2Config(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=len(kinds), layer_types=kinds,
        intermediate_size=4 * width, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=1 << 15, **_NO_TOKENS,
    ))  # fmt: skip


def qwen3_next() -> Any:
    """Four narrow layers."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(Qwen3NextConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=4, layer_types=["linear_attention"] * 3 +
        ["full_attention"], intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        **_NO_TOKENS,
    ))  # fmt: skip


def deepseek(layers: int) -> Any:
    """DeepSeek-V3 at an eighth of its width and heads, with its own head sizes and dense layers."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(
        vocab_size=1024, hidden_size=896, intermediate_size=2304, num_hidden_layers=layers,
        first_k_dense_replace=layers, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=192,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        max_position_embeddings=1 << 16, attn_implementation="eager",
    ))  # fmt: skip


def stock(kind: str) -> Any:
    """A causal language model of transformers: 4 layers of width 256, 4 heads, 2 of keys but in GPT-2."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    if kind != "gpt2":
        sizes |= {"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model(kind, vocab_size=1000, initializer_range=0.06, **sizes)
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config)


def _ready(model: Any) -> Any:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def eagerly(make: Callable[[], Any]) -> Any:
    """The model with attention as its authors write it."""
    model = made(make)
    model.set_attn_implementation("eager")
    return model


def made(make: Callable[[], Any]) -> Any:
    """The model in eval mode; weights are the same in every process."""
    torch.manual_seed(0)
    return make().eval()


REAL: Mapping[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama}
