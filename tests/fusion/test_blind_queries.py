"""A mask that hides every key from a query is told in the report: usually it was inverted by mistake."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attngraph


def report(hidden: Tensor, fill: float) -> str:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[2]
        return (q @ k.mT).masked_fill(hidden[:t, :t], fill).softmax(-1) @ v

    (found,) = attngraph.explain(model, *torch.randn(3, 2, 4, 7, 8)).attention
    return found.mask


@pytest.mark.parametrize("fill", [-torch.inf, -1e9])
@pytest.mark.parametrize(
    ("hidden", "query"),
    [(torch.ones(9, 9).tril() == 1, 6), (torch.ones(9, 9).triu() == 1, 0)],
    ids=["inverted", "the token itself hidden too"],
)
def test_a_query_that_sees_no_key_is_told(hidden: Tensor, query: int, fill: float) -> None:
    assert f"query {query} sees no key: is the mask inverted?" in report(hidden, fill)


@pytest.mark.parametrize(
    "hidden",
    [torch.ones(9, 9).triu(1) == 1, torch.ones(9, 9).tril(-1) == 1, torch.eye(9) == 1, torch.eye(9) == 0],
    ids=["causal", "later tokens alone", "all but itself", "itself alone"],
)
def test_other_masks_are_told_without_a_warning(hidden: Tensor) -> None:
    assert "sees no key" not in report(hidden, -torch.inf)


def test_a_mask_of_data_is_told_without_a_warning() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~keep[:, None, None], -torch.inf).softmax(-1) @ v

    inputs = (*torch.randn(3, 2, 4, 7, 8), torch.zeros(2, 7, dtype=torch.bool))
    (found,) = attngraph.explain(model, *inputs).attention
    assert "sees no key" not in found.mask
