"""The modern decoder equals stock Llama on the same weights, and its spellings agree."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.grouped_attention import SharingSpelling
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig, RMSNorm
from attngraph.models.positions import RotaryLayout
from attngraph.models.text import byte_batch

SMALL = ModernDecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_width=6, hidden=24)
LAYOUTS = get_args(RotaryLayout)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_logits_equal_those_of_transformers_llama_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-6,
        attn_implementation="eager", use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = ModernDecoder(SMALL).eval()
    weights = {
        "embedding.weight": theirs.model.embed_tokens.weight,
        "norm.gain": theirs.model.norm.weight,
        "head.weight": theirs.lm_head.weight,
    }
    for i, layer in enumerate(theirs.model.layers):
        weights |= {
            f"blocks.{i}.attention_norm.gain": layer.input_layernorm.weight,
            f"blocks.{i}.attention.query.weight": layer.self_attn.q_proj.weight,
            f"blocks.{i}.attention.key.weight": layer.self_attn.k_proj.weight,
            f"blocks.{i}.attention.value.weight": layer.self_attn.v_proj.weight,
            f"blocks.{i}.attention.project.weight": layer.self_attn.o_proj.weight,
            f"blocks.{i}.feed_forward_norm.gain": layer.post_attention_layernorm.weight,
            f"blocks.{i}.feed_forward.gate.weight": layer.mlp.gate_proj.weight,
            f"blocks.{i}.feed_forward.up.weight": layer.mlp.up_proj.weight,
            f"blocks.{i}.feed_forward.down.weight": layer.mlp.down_proj.weight,
        }
    for tensor in weights.values():
        torch.nn.init.normal_(tensor, std=0.3)
    ours.load_state_dict(weights)
    ids = byte_batch(2, 11)
    # Llama takes its norms and softmax in float32 whatever the weights are, so float32 it is.
    assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_two_rotary_layouts_differ_by_a_permutation_of_the_projections() -> None:
    half = ModernDecoder(replace(SMALL, rotary="half")).double()
    interleaved = ModernDecoder(replace(SMALL, rotary="interleaved")).double()
    weights = half.state_dict()
    ids = byte_batch(2, 11)
    interleaved.load_state_dict(weights)
    assert not torch.allclose(interleaved(ids), half(ids))
    for name, weight in weights.items():
        if name.endswith(("query.weight", "key.weight")):
            heads = weight.unflatten(0, (-1, 2, 3))  # [heads, first or second of a pair, pair, C]
            weights[name] = heads.transpose(1, 2).flatten(0, 2)
    interleaved.load_state_dict(weights)
    assert_close(interleaved(ids), half(ids))


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm, x = RMSNorm(6, 1e-6).double(), rand(5, 6)
    torch.nn.init.normal_(norm.gain)
    gain = norm.gain.tolist()
    expected = [
        [g * v / (sum(u * u for u in row) / 6 + 1e-6) ** 0.5 for g, v in zip(gain, row, strict=True)]
        for row in x.tolist()
    ]
    assert_close(norm(x), torch.tensor(expected, dtype=torch.float64))


def test_the_three_spellings_of_shared_heads_give_the_same_logits() -> None:
    ids, results = byte_batch(2, 9), []
    weights = ModernDecoder(SMALL).double().state_dict()
    for spelling in get_args(SharingSpelling):
        model = ModernDecoder(replace(SMALL, sharing=spelling)).double()
        model.load_state_dict(weights)
        results.append(model(ids))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])
