"""Shared key/value heads: the definition, the three spellings, and both ends of the range."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.attention import AttentionConfig, MultiHeadAttention
from attngraph.models.grouped_attention import (
    GroupedQueryAttention,
    GroupedQueryConfig,
    MultiQueryAttention,
    MultiQueryConfig,
    SharingSpelling,
)

Oracle = Callable[..., Tensor]
SPELLINGS = get_args(SharingSpelling)
GROUPED = GroupedQueryConfig(width=8, heads=6, kv_heads=2, key_width=4, value_width=5)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_query_attention_equals_the_definition(
    kv_heads: int, spelling: SharingSpelling, causal: bool, attend: Oracle, heads_of: Oracle, join: Oracle
) -> None:
    config = replace(GROUPED, kv_heads=kv_heads, spelling=spelling, causal=causal)
    module, x = GroupedQueryAttention(config).double(), rand(2, 5, 8)
    query = heads_of(x, module.query.weight, module.query.bias, 6)
    key = heads_of(x, module.key.weight, module.key.bias, kv_heads)
    value = heads_of(x, module.value.weight, module.value.bias, kv_heads)
    mixed = attend(query, key, value, scale=0.5, keep=lambda b, h, q, k: k <= q or not causal)
    assert_close(module(x), join(mixed, module.project))


def test_the_three_spellings_agree_in_value_and_gradient() -> None:
    x = rand(2, 5, 8)
    weights = GroupedQueryAttention(GROUPED).double().state_dict()
    results = []
    for spelling in SPELLINGS:
        module = GroupedQueryAttention(replace(GROUPED, spelling=spelling)).double()
        module.load_state_dict(weights)
        output = module(x)
        output.square().sum().backward()
        results.append((output, [weight.grad for weight in module.parameters()]))
    for output, gradients in results[1:]:
        assert_close(output, results[0][0])
        assert_close(gradients, results[0][1])


@pytest.mark.parametrize("causal", [False, True])
def test_multi_query_attention_is_grouped_with_one_group(causal: bool) -> None:
    config = MultiQueryConfig(width=8, heads=6, key_width=4, value_width=5, causal=causal)
    multi = MultiQueryAttention(config).double()
    grouped = GroupedQueryAttention(replace(GROUPED, kv_heads=1, causal=causal)).double()
    grouped.load_state_dict(multi.state_dict())
    x = rand(2, 5, 8)
    assert_close(multi(x), grouped(x))


def test_as_many_groups_as_heads_is_multi_head_attention() -> None:
    grouped = GroupedQueryAttention(replace(GROUPED, kv_heads=6, causal=False)).double()
    config = AttentionConfig(width=8, heads=6, key_width=4, value_width=5)
    multi_head = MultiHeadAttention(config).double()
    multi_head.load_state_dict(grouped.state_dict())
    x = rand(2, 5, 8)
    assert_close(grouped(x), multi_head(x))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_dropout_acts_on_the_weights_in_training_only(spelling: SharingSpelling) -> None:
    module = GroupedQueryAttention(replace(GROUPED, spelling=spelling, dropout=1.0)).double()
    x = rand(2, 5, 8)
    assert_close(module(x), module.project.bias.expand(2, 5, 8))
    assert not torch.allclose(module.eval()(x), module.project.bias)
