"""Linear attention equals its other orders of summation: a matrix of sums, and a recurrence."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.linear_attention import FeatureMap, LinearAttention, LinearAttentionConfig

Oracle = Callable[..., Tensor]
SMALL = LinearAttentionConfig(width=6, heads=3, key_width=4, value_width=5)
FEATURES = get_args(FeatureMap)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def heads_by(module: LinearAttention, x: Tensor, heads_of: Oracle) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        heads_of(x, part.weight, part.bias, 3) for part in (module.query, module.key, module.value)
    )
    return query, key, value


def positive(x: Tensor) -> Tensor:
    """elu(x) + 1 by its two cases: x + 1 above zero, e^x below."""
    return torch.where(x > 0, x + 1, x.exp())


def test_one_head_without_biases_is_the_product_of_six_matrices() -> None:
    config = replace(SMALL, heads=1, bias=False, causal=False, feature_map="identity")
    module, x = LinearAttention(config).double(), rand(7, 6)
    w_q, w_k, w_v, w_o = (p.weight.T for p in (module.query, module.key, module.value, module.project))
    assert_close(module(x[None])[0], torch.linalg.multi_dot([x, w_q, w_k.T, x.T, x, w_v, w_o]))


@pytest.mark.parametrize("feature_map", FEATURES)
def test_looking_both_ways_it_equals_the_sum_over_keys_taken_first(
    feature_map: FeatureMap, heads_of: Oracle, join: Oracle
) -> None:
    module = LinearAttention(replace(SMALL, causal=False, feature_map=feature_map)).double()
    x = rand(2, 9, 6)
    query, key, value = heads_by(module, x, heads_of)
    if feature_map == "elu":
        query, key = positive(query), positive(key)
    state = torch.einsum("bhjd,bhjv->bhdv", key, value)
    mixed = torch.einsum("bhid,bhdv->bhiv", query, state)
    if feature_map == "elu":
        mixed = mixed / torch.einsum("bhid,bhd->bhi", query, key.sum(2))[..., None]
    assert_close(module(x), join(mixed, module.project))


@pytest.mark.parametrize("feature_map", FEATURES)
def test_causal_it_equals_the_recurrence_of_running_sums(
    feature_map: FeatureMap, heads_of: Oracle, join: Oracle
) -> None:
    module, x = LinearAttention(replace(SMALL, feature_map=feature_map)).double(), rand(2, 9, 6)
    query, key, value = heads_by(module, x, heads_of)
    if feature_map == "elu":
        query, key = positive(query), positive(key)
    state, total = torch.zeros(2, 3, 4, 5, dtype=torch.float64), torch.zeros(2, 3, 4, dtype=torch.float64)
    mixed = []
    for t in range(9):
        state = state + key[:, :, t, :, None] * value[:, :, t, None, :]
        total = total + key[:, :, t]
        output = (query[:, :, t, :, None] * state).sum(2)
        norm = (query[:, :, t] * total).sum(2, keepdim=True) if feature_map == "elu" else 1.0
        mixed.append(output / norm)
    assert_close(module(x), join(torch.stack(mixed, dim=2), module.project))


@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_positive_features_sum_to_one(causal: bool) -> None:
    module, x = LinearAttention(replace(SMALL, causal=causal)).double(), rand(2, 9, 6)
    with torch.no_grad():
        module.value.weight.zero_()  # every value is the bias, and so is every mean of values
    expected = module.project(module.value.bias).expand(2, 9, 6)
    assert_close(module(x), expected)


@pytest.mark.parametrize("feature_map", FEATURES)
def test_the_causal_output_at_t_does_not_move_when_a_later_token_changes(feature_map: FeatureMap) -> None:
    module, x = LinearAttention(replace(SMALL, feature_map=feature_map)).double(), rand(2, 9, 6)
    changed = x.clone()
    changed[:, 5] += 1.0
    before, after = module(x), module(changed)
    assert_close(after[:, :5], before[:, :5], rtol=0, atol=0)
    assert (after[:, 5:] != before[:, 5:]).any(dim=-1).all()
