"""Decoders of classes of transformers that have convolutions, state spaces or loops over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngraph

transformers = pytest.importorskip("transformers")

PROMPT, NEW = 7, 64
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
CLASSES: dict[str, Callable[[], Any]] = {
    "Lfm2": lambda: transformers.Lfm2Config(**SIZES, **HEADS, layer_types=["conv", "full_attention"]),
    "Mamba": lambda: transformers.MambaConfig(**SIZES, state_size=4, time_step_rank=4),
    "Mamba2": lambda: transformers.Mamba2Config(
        **SIZES, state_size=8, num_heads=4, head_dim=16, n_groups=2, chunk_size=8
    ),
    "Jamba": lambda: transformers.JambaConfig(
        **SIZES, **HEADS, attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1,
        mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "Qwen3Next": lambda: transformers.Qwen3NextConfig(
        **SIZES, **HEADS, head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=4,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    "MiniMax": lambda: transformers.MiniMaxConfig(
        **SIZES, **HEADS, head_dim=8, layer_types=["linear_attention", "full_attention"], block_size=8,
        num_local_experts=2,
    ),
    "Rwkv": lambda: transformers.RwkvConfig(**SIZES, context_length=64, rescale_every=1),
    "RecurrentGemma": lambda: transformers.RecurrentGemmaConfig(
        **SIZES, **HEADS, lru_width=32, attention_window_size=24, block_types=["recurrent", "attention"]
    ),
}  # fmt: skip
RECOMPUTED = ("Rwkv",)
"""Classes whose own cached path is at fault: `generate` gives RWKV the state and all tokens again."""


QUICK = ("Mamba2", "Qwen3Next")
"""The mixers of the others are written out in `test_recurrences.py` and `test_windows.py`."""


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CLASSES]
)
def test_a_stock_class_gives_the_tokens_of_its_own_generate(name: str) -> None:
    torch.manual_seed(0)
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    config = CLASSES[name]()
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    ids = torch.randint(3, 50, (2, PROMPT))
    decoder = attngraph.compile(model, cache=True)
    found = decoder.generate(ids, NEW)
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        pad_token_id=0, use_cache=name not in RECOMPUTED,
    )  # fmt: skip
    assert torch.equal(found, theirs)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    padded = decoder.generate(ids, 16, attention_mask=mask)[:, -16:]
    alone = torch.cat([decoder.generate(row, 16)[:, -16:] for row in (ids[:1], ids[1:, 4:])])
    assert torch.equal(padded, alone)


@pytest.mark.slow
def test_chunks_that_are_longer_than_the_prompt_decode() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 1}
    config = transformers.Mamba2Config(**sizes, state_size=8, num_heads=4, head_dim=16, n_groups=2)
    assert config.chunk_size > PROMPT
    model = transformers.Mamba2ForCausalLM(config).eval()
    ids = torch.randint(3, 50, (2, PROMPT))
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(attngraph.compile(model, cache=True).generate(ids, 8), wanted)
