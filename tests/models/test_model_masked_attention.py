"""Masked attention equals its definition over the visible keys, in both mask conventions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.masked_attention import (
    CausalAttentionConfig,
    CausalSelfAttention,
    MaskedAttentionConfig,
    MaskedSelfAttention,
    PaddedSelfAttention,
    SlidingWindowAttention,
    SlidingWindowConfig,
)

Oracle = Callable[..., Tensor]
CAUSAL = CausalAttentionConfig(width=6, heads=3, key_width=4, value_width=5, max_tokens=16)
MASKED = MaskedAttentionConfig(width=6, heads=3, key_width=4, value_width=5)
WINDOW = SlidingWindowConfig(width=6, heads=3, key_width=4, value_width=5, window=4)
CONVENTIONS: list[Literal["drop", "keep"]] = ["drop", "keep"]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def expected_packed(
    module: CausalSelfAttention | SlidingWindowAttention,
    x: Tensor,
    keep: Callable[[int, int, int, int], bool],
    oracles: tuple[Oracle, Oracle, Oracle],
) -> Tensor:
    attend, heads_of, join = oracles
    weight, bias = module.qkv.weight, module.qkv.bias
    spans = (slice(0, 12), slice(12, 24), slice(24, None))
    query, key, value = (heads_of(x, weight[s], bias[s], 3) for s in spans)
    return join(attend(query, key, value, scale=0.5, keep=keep), module.project)


def expected_masked(
    module: MaskedSelfAttention,
    x: Tensor,
    keep: Callable[[int, int, int, int], bool],
    oracles: tuple[Oracle, Oracle, Oracle],
) -> Tensor:
    attend, heads_of, join = oracles
    query, key, value = (
        heads_of(x, part.weight, part.bias, 3) for part in (module.query, module.key, module.value)
    )
    return join(attend(query, key, value, scale=0.5, keep=keep), module.project)


@pytest.fixture
def oracles(attend: Oracle, heads_of: Oracle, join: Oracle) -> tuple[Oracle, Oracle, Oracle]:
    return attend, heads_of, join


def test_causal_attention_equals_the_definition_below_its_buffer(
    oracles: tuple[Oracle, Oracle, Oracle],
) -> None:
    module, x = CausalSelfAttention(CAUSAL).double(), rand(2, 7, 6)
    assert module.triangle.shape == (16, 16)
    assert_close(module(x), expected_packed(module, x, lambda b, h, q, k: k <= q, oracles))


def test_causal_attention_at_t_does_not_move_when_a_later_token_changes() -> None:
    module, x = CausalSelfAttention(CAUSAL).double(), rand(2, 8, 6)
    changed = x.clone()
    changed[:, 5] += 1.0
    before, after = module(x), module(changed)
    assert_close(after[:, :5], before[:, :5], rtol=0, atol=0)
    assert (after[:, 5:] != before[:, 5:]).any(dim=-1).all()


def test_the_triangle_is_not_in_the_checkpoint() -> None:
    assert "triangle" not in CausalSelfAttention(CAUSAL).state_dict()


def test_residual_dropout_drops_the_output() -> None:
    module = CausalSelfAttention(replace(CAUSAL, dropout=1.0)).double()
    assert not module(rand(2, 5, 6)).any()
    assert module.eval()(rand(2, 5, 6)).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("true_means", CONVENTIONS)
@pytest.mark.parametrize("shape", [(7, 7), (2, 1, 7, 7), (1, 3, 7, 7), (2, 3, 7, 7)])
def test_masked_attention_equals_the_definition(
    shape: tuple[int, ...],
    true_means: Literal["drop", "keep"],
    causal: bool,
    oracles: tuple[Oracle, Oracle, Oracle],
) -> None:
    config = replace(MASKED, true_means=true_means, causal=causal)
    module, x = MaskedSelfAttention(config).double(), rand(2, 7, 6)
    visible = (torch.rand(shape) < 0.6) | torch.eye(7, dtype=torch.bool)
    table = visible.expand(2, 3, 7, 7).tolist()

    def keep(b: int, h: int, q: int, k: int) -> bool:
        return bool(table[b][h][q][k]) and (k <= q or not causal)

    mask = visible if true_means == "keep" else ~visible
    assert_close(module(x, mask), expected_masked(module, x, keep, oracles))


def test_the_two_mask_conventions_are_negations_of_each_other() -> None:
    drop = MaskedSelfAttention(MASKED).double()
    keep = MaskedSelfAttention(replace(MASKED, true_means="keep")).double()
    keep.load_state_dict(drop.state_dict())
    x, mask = rand(2, 7, 6), torch.eye(7, dtype=torch.bool).roll(1, 0)
    assert_close(drop(x, mask), keep(x, ~mask), rtol=0, atol=0)
    assert not torch.allclose(drop(x, mask), keep(x, mask))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("true_means", CONVENTIONS)
def test_padded_attention_equals_the_definition_over_real_tokens(
    true_means: Literal["drop", "keep"], causal: bool, oracles: tuple[Oracle, Oracle, Oracle]
) -> None:
    config = replace(MASKED, true_means=true_means, causal=causal)
    module, x = PaddedSelfAttention(config).double(), rand(2, 7, 6)
    lengths = [7, 4]
    real = torch.arange(7) < torch.tensor(lengths)[:, None]

    def keep(b: int, h: int, q: int, k: int) -> bool:
        return k < lengths[b] and (k <= q or not causal)

    padding = real if true_means == "keep" else ~real
    expected = expected_masked(module.attention, x, keep, oracles)
    assert_close(module(x, padding), expected)


def test_without_a_mask_everything_is_visible(oracles: tuple[Oracle, Oracle, Oracle]) -> None:
    module, x = PaddedSelfAttention(MASKED).double(), rand(2, 5, 6)
    assert_close(module(x), expected_masked(module.attention, x, lambda b, h, q, k: True, oracles))


def test_real_tokens_do_not_move_when_padding_changes() -> None:
    module, x = PaddedSelfAttention(MASKED).double(), rand(2, 7, 6)
    padding = torch.arange(7).expand(2, 7) >= 5
    changed = x.clone()
    changed[:, 5:] = rand(2, 2, 6)
    assert_close(module(changed, padding)[:, :5], module(x, padding)[:, :5], rtol=0, atol=0)


def test_a_row_that_sees_no_key_is_nan_and_no_other_is() -> None:
    module, x = MaskedSelfAttention(MASKED).double(), rand(2, 7, 6)
    mask = torch.zeros(7, 7, dtype=torch.bool)
    mask[3] = True  # drop everything for query 3
    output = module(x, mask)
    assert output[:, 3].isnan().all()
    assert output[:, [0, 1, 2, 4, 5, 6]].isfinite().all()


def test_left_padding_under_a_causal_mask_leaves_the_first_rows_nan() -> None:
    module = PaddedSelfAttention(replace(MASKED, causal=True)).double()
    padding = torch.tensor([[True, True, False, False, False]])
    output = module(rand(1, 5, 6), padding)
    assert output[:, :2].isnan().all()
    assert output[:, 2:].isfinite().all()


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_sliding_window_equals_the_definition(
    causal: bool, window: int, oracles: tuple[Oracle, Oracle, Oracle]
) -> None:
    module = SlidingWindowAttention(replace(WINDOW, window=window, causal=causal)).double()
    x = rand(2, 8, 6)

    def keep(b: int, h: int, q: int, k: int) -> bool:
        return q - window <= k <= q if causal else abs(q - k) <= window // 2

    assert_close(module(x), expected_packed(module, x, keep, oracles))


def test_a_token_outside_the_window_has_no_influence() -> None:
    module = SlidingWindowAttention(replace(WINDOW, causal=True)).double()
    x = rand(1, 9, 6)
    changed = x.clone()
    changed[:, 2] += 1.0
    moved = (module(changed) != module(x)).any(dim=-1)[0].tolist()
    assert moved == [2 <= t <= 6 for t in range(9)]


def test_a_causal_window_as_long_as_the_text_is_causal_attention() -> None:
    causal = CausalSelfAttention(CAUSAL).double()
    window = SlidingWindowAttention(replace(WINDOW, window=8, causal=True)).double()
    window.load_state_dict(causal.state_dict())
    x = rand(2, 8, 6)
    assert_close(window(x), causal(x), rtol=0, atol=1e-15)
