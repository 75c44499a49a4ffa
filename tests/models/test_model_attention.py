"""Attention without masks equals its definition, and has the symmetries that it must have."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from attngraph.models.attention import (
    AttentionConfig,
    CrossAttention,
    CrossAttentionConfig,
    DotProductAttention,
    HeadByHeadAttention,
    MultiHeadAttention,
    PackedMultiHeadAttention,
    ScaledDotProductAttention,
    Seq2SeqAttention,
)

Oracle = Callable[..., Tensor]
SMALL = AttentionConfig(width=6, heads=3, key_width=4, value_width=5)  # D != Dv
SELF_ATTENTIONS = [MultiHeadAttention, PackedMultiHeadAttention, HeadByHeadAttention]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def qkv_of(module: nn.Module, x: Tensor, heads_of: Oracle) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a self-attention, from its weights by slices."""
    if isinstance(module, HeadByHeadAttention):
        query, key, value = (
            torch.cat(
                [
                    heads_of(x, getattr(head, part).weight, getattr(head, part).bias, 1)
                    for head in module.heads
                ],
                dim=1,
            )
            for part in ("query", "key", "value")
        )
        return query, key, value
    if isinstance(module, PackedMultiHeadAttention):
        weight, bias = module.qkv.weight, module.qkv.bias
        keys = SMALL.heads * SMALL.key_width
        spans = (slice(0, keys), slice(keys, 2 * keys), slice(2 * keys, None))
        query, key, value = (heads_of(x, weight[s], bias[s], SMALL.heads) for s in spans)
        return query, key, value
    query, key, value = (
        heads_of(x, getattr(module, part).weight, getattr(module, part).bias, SMALL.heads)
        for part in ("query", "key", "value")
    )
    return query, key, value


def test_one_unscaled_query_equals_the_definition(attend: Oracle) -> None:
    query, keys, values = rand(4), rand(7, 4), rand(7, 3)
    expected = attend(query[None, None, None], keys[None, None], values[None, None], scale=1.0)
    assert_close(DotProductAttention()(query, keys, values), expected[0, 0, 0])


def test_seq2seq_attention_is_one_query_per_row_with_keys_as_values(attend: Oracle) -> None:
    state, encoder_states = rand(3, 4), rand(3, 6, 4)
    memory = encoder_states[:, None]  # one head
    expected = attend(state[:, None, None], memory, memory, scale=1.0)
    assert_close(Seq2SeqAttention()(state, encoder_states), expected[:, 0, 0])


def test_scaled_dot_product_attention_equals_the_definition(attend: Oracle) -> None:
    query, key, value = rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6)
    expected = attend(query, key, value, scale=1 / math.sqrt(4))
    assert_close(ScaledDotProductAttention()(query, key, value), expected)


@pytest.mark.parametrize("kind", SELF_ATTENTIONS)
def test_multi_head_attention_equals_the_definition(
    kind: type[nn.Module], attend: Oracle, heads_of: Oracle, join: Oracle
) -> None:
    module, x = kind(SMALL).double(), rand(2, 5, 6)
    query, key, value = qkv_of(module, x, heads_of)
    expected = join(attend(query, key, value, scale=1 / math.sqrt(4)), module.project)
    assert_close(module(x), expected)


@pytest.mark.parametrize("kind", SELF_ATTENTIONS)
def test_self_attention_without_positions_commutes_with_permutations(kind: type[nn.Module]) -> None:
    module, x, order = kind(SMALL).double(), rand(2, 9, 6), torch.randperm(9)
    assert_close(module(x[:, order]), module(x)[:, order])


def test_cross_attention_equals_the_definition(attend: Oracle, heads_of: Oracle, join: Oracle) -> None:
    config = CrossAttentionConfig(width=6, heads=3, key_width=4, value_width=5, memory_width=8)
    module, x, memory = CrossAttention(config).double(), rand(2, 5, 6), rand(2, 7, 8)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    query = heads_of(x, module.query.weight, module.query.bias, 3)
    key = heads_of(memory, module.key.weight, module.key.bias, 3)
    value = heads_of(memory, module.value.weight, module.value.bias, 3)

    everything = attend(query, key, value, scale=0.5)
    assert_close(module(x, memory), join(everything, module.project))
    real = attend(query, key, value, scale=0.5, keep=lambda b, h, q, k: not padding[b, k])
    assert_close(module(x, memory, padding), join(real, module.project))


def test_attention_is_invariant_to_permuting_key_value_pairs() -> None:
    order = torch.randperm(7)
    query, keys, values = rand(4), rand(7, 4), rand(7, 3)
    one = DotProductAttention()
    assert_close(one(query, keys[order], values[order]), one(query, keys, values))

    config = CrossAttentionConfig(width=6, heads=3, key_width=4, value_width=5, memory_width=8)
    cross, x, memory = CrossAttention(config).double(), rand(2, 5, 6), rand(2, 7, 8)
    assert_close(cross(x, memory[:, order]), cross(x, memory))


@pytest.mark.parametrize("kind", SELF_ATTENTIONS)
def test_dropout_acts_on_the_weights_in_training_only(kind: type[nn.Module]) -> None:
    config = AttentionConfig(width=6, heads=3, key_width=4, value_width=5, dropout=1.0)
    module, x = kind(config).double(), rand(2, 5, 6)
    assert isinstance(module.project, nn.Linear)
    assert_close(module(x), module.project.bias.expand(2, 5, 6))
    assert not torch.allclose(module.eval()(x), module.project.bias)


@pytest.mark.parametrize("kind", SELF_ATTENTIONS)
def test_without_bias_no_projection_has_one(kind: type[nn.Module]) -> None:
    module = kind(AttentionConfig(width=6, heads=3, key_width=4, value_width=5, bias=False))
    assert not [name for name, _ in module.named_parameters() if name.endswith("bias")]
