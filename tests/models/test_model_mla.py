"""Latent attention equals its definition by loops, its spellings agree, and it is stock DeepSeek-V3's."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.mla import LatentAttention, MLAConfig, MLADecoder, RotaryLatentAttention, ScoreSpelling
from attngraph.models.positions import RotaryLayout
from attngraph.models.text import byte_batch

SMALL = MLAConfig(
    layers=2, width=16, heads=3, latent=8, nope=4, rope=2, value=5, query_rank=6, hidden=24
)  # fmt: skip
SPELLINGS, LAYOUTS = get_args(ScoreSpelling), get_args(RotaryLayout)


def turned(pair: tuple[float, float], position: int, angle: float) -> tuple[float, float]:
    cos, sin = math.cos(position * angle), math.sin(position * angle)
    return pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos


def test_keys_and_values_are_made_from_the_latent(
    attend: Callable[..., Tensor], heads_of: Callable[..., Tensor], join: Callable[..., Tensor]
) -> None:
    layer, x = LatentAttention(replace(SMALL, bias=True)).double(), torch.randn(2, 6, 16).double()
    latent = torch.einsum("btc,lc->btl", x, layer.down.weight) + layer.down.bias
    query = heads_of(x, layer.query.weight, layer.query.bias, 3)
    key = heads_of(latent, layer.key_up.weight, layer.key_up.bias, 3)
    value = heads_of(latent, layer.value_up.weight, layer.value_up.bias, 3)
    mixed = attend(query, key, value, scale=0.5, keep=lambda b, h, q, k: k <= q)
    assert_close(layer(x), join(mixed, layer.project))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_decoupled_form_by_loops(
    spelling: ScoreSpelling, attend: Callable[..., Tensor], join: Callable[..., Tensor]
) -> None:
    config = replace(SMALL, norm=False, query_rank=None, scores=spelling)
    layer, x = RotaryLatentAttention(config).double().requires_grad_(False), torch.randn(2, 5, 16).double()
    down = x @ layer.down.weight.T
    latent, rotary = down[..., :8], down[..., 8:]
    up = layer.up.weight.reshape(3, 9, 8)
    queries = (x @ layer.query.up.weight.T).reshape(2, 5, 3, 6)
    query, key = torch.empty(2, 3, 5, 6).double(), torch.empty(2, 3, 5, 6).double()
    value = torch.empty(2, 3, 5, 5).double()
    for b in range(2):
        for h in range(3):
            for t in range(5):
                a, c = queries[b, t, h, 4:].tolist()
                query[b, h, t] = torch.tensor([*queries[b, t, h, :4].tolist(), *turned((a, c), t, 1.0)])
                a, c = rotary[b, t].tolist()
                own = [sum(up[h, d, j] * latent[b, t, j] for j in range(8)) for d in range(9)]
                key[b, h, t] = torch.tensor([*own[:4], *turned((a, c), t, 1.0)])
                value[b, h, t] = torch.tensor(own[4:])
    mixed = attend(query, key, value, scale=1 / math.sqrt(6), keep=lambda b, h, q, k: k <= q)
    assert_close(layer(x), join(mixed, layer.project))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_three_spellings_of_the_scores_give_the_same_logits(layout: RotaryLayout) -> None:
    ids, results = byte_batch(2, 9), []
    weights = MLADecoder(SMALL).double().state_dict()
    for spelling in SPELLINGS:
        model = MLADecoder(replace(SMALL, scores=spelling, rotary=layout)).double()
        model.load_state_dict(weights)
        results.append(model(ids))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])


def test_logits_equal_those_of_transformers_deepseek_v3_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
    config = transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2, first_k_dense_replace=2,
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=6, kv_lora_rank=8, qk_rope_head_dim=2,
        qk_nope_head_dim=4, v_head_dim=5, rope_interleave=True, rms_norm_eps=1e-6, use_cache=False,
        attn_implementation="eager", tie_word_embeddings=False, n_group=1, topk_group=1,
    )  # fmt: skip
    theirs = transformers.DeepseekV3ForCausalLM(config).eval()
    ours = MLADecoder(SMALL).eval()
    weights = {
        "embedding.weight": theirs.model.embed_tokens.weight,
        "norm.gain": theirs.model.norm.weight,
        "head.weight": theirs.lm_head.weight,
    }
    for i, layer in enumerate(theirs.model.layers):
        own, block = layer.self_attn, f"blocks.{i}"
        weights |= {
            f"{block}.attention_norm.gain": layer.input_layernorm.weight,
            f"{block}.attention.query.down.weight": own.q_a_proj.weight,
            f"{block}.attention.query.norm.gain": own.q_a_layernorm.weight,
            f"{block}.attention.query.up.weight": own.q_b_proj.weight,
            f"{block}.attention.down.weight": own.kv_a_proj_with_mqa.weight,
            f"{block}.attention.norm.gain": own.kv_a_layernorm.weight,
            f"{block}.attention.up.weight": own.kv_b_proj.weight,
            f"{block}.attention.project.weight": own.o_proj.weight,
            f"{block}.feed_forward_norm.gain": layer.post_attention_layernorm.weight,
            f"{block}.feed_forward.gate.weight": layer.mlp.gate_proj.weight,
            f"{block}.feed_forward.up.weight": layer.mlp.up_proj.weight,
            f"{block}.feed_forward.down.weight": layer.mlp.down_proj.weight,
        }
    for tensor in weights.values():
        torch.nn.init.normal_(tensor, std=0.3)
    ours.load_state_dict(weights)
    ids = byte_batch(2, 11)
    # Their norms and softmax are in float32 whatever the weights are, so float32 it is.
    assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
