"""The sparse patterns are the sets of the paper, and their heads together reach all of the past."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attngraph.models.sparse_attention import (
    SparseAttention,
    SparseAttentionConfig,
    SparsePattern,
    sparse_pattern,
)

Oracle = Callable[..., Tensor]
SMALL = SparseAttentionConfig(width=6, heads=3, key_width=4, value_width=5, stride=4, summary=2)
PATTERNS = get_args(SparsePattern)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def papers_set(pattern: SparsePattern, kind: int, i: int) -> set[int]:
    """A_i of Child et al. 2019, section 4.3, at stride 4 and summary 2, as a set of positions."""
    if pattern == "strided":
        return set(range(max(0, i - 4), i + 1)) if kind == 0 else set(range(i, -1, -4))
    if kind == 0:
        return set(range(i - i % 4, i + 1))
    summaries = {block + offset for block in range(0, i + 1, 4) for offset in (2, 3)}
    return {j for j in summaries if j <= i}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_heads_see_the_sets_of_the_paper_in_turns(pattern: SparsePattern) -> None:
    visible = sparse_pattern(14, replace(SMALL, pattern=pattern), torch.device("cpu"))
    for h in range(3):
        for i in range(14):
            assert set(visible[h, i].nonzero().flatten().tolist()) == papers_set(pattern, h % 2, i)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparse_attention_equals_the_definition_and_the_sum_of_nothing_is_zero(
    pattern: SparsePattern, attend: Oracle, heads_of: Oracle, join: Oracle
) -> None:
    module, x = SparseAttention(replace(SMALL, pattern=pattern)).double(), rand(2, 11, 6)
    weight, bias = module.qkv.weight, module.qkv.bias
    spans = (slice(0, 12), slice(12, 24), slice(24, None))
    query, key, value = (heads_of(x, weight[s], bias[s], 3) for s in spans)
    mixed = attend(query, key, value, scale=0.5, keep=lambda b, h, q, k: k in papers_set(pattern, h % 2, q))
    empty = mixed.isnan()
    assert empty.any() == (pattern == "fixed")
    assert_close(module(x), join(mixed.masked_fill(empty, 0.0), module.project))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_finite_even_of_rows_that_see_nothing(pattern: SparsePattern) -> None:
    module, x = SparseAttention(replace(SMALL, pattern=pattern)).double(), rand(2, 11, 6).requires_grad_()
    module(x).square().sum().backward()
    for tensor in (x, *module.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_two_steps_of_the_two_kinds_of_heads_reach_all_of_the_past(pattern: SparsePattern) -> None:
    first, second, _ = sparse_pattern(30, replace(SMALL, pattern=pattern), torch.device("cpu")).double()
    one, other = (first, second) if pattern == "strided" else (second, first)
    reached = (one @ other + first) > 0  # query to key through a token in between, or at once
    assert torch.equal(reached, torch.ones(30, 30).tril().bool())


def test_a_head_sees_about_twice_the_root_of_the_tokens() -> None:
    sizes = replace(SMALL, stride=32, summary=1)
    for pattern in PATTERNS:
        visible = sparse_pattern(1024, replace(sizes, pattern=pattern), torch.device("cpu"))
        assert visible.sum(dim=-1).max() <= 33
