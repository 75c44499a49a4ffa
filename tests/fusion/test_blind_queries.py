"""A mask that hides every key from a query is told in the report: usually it was inverted by mistake."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.ir.language.parser import parse
from attngraph.meaning.masks.visible import warn_of_blind_rows

Mask = Callable[[Tensor, Tensor], Tensor]
"""The pairs that a mask keeps, by the places of query and key."""


def report(keep: Mask, fill: float = -torch.inf, tabled: bool = False) -> attngraph.CompileReport:
    """The report of an attention under a mask that is computed in the call, or before it as a table."""
    table = keep(torch.arange(9)[:, None], torch.arange(9))

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[2]
        kept = table[:t, :t] if tabled else keep(torch.arange(t)[:, None], torch.arange(t))
        return (q @ k.mT).masked_fill(~kept, fill).softmax(-1) @ v

    return attngraph.explain(model, *torch.randn(3, 2, 4, 7, 8, dtype=torch.float64))


@pytest.mark.parametrize("fill", [-torch.inf, -1e9])
@pytest.mark.parametrize(
    ("keep", "query", "tabled"),
    [
        (lambda q, k: k > q, 6, False),
        (lambda q, k: k > q, 6, True),
        (lambda q, k: k < q, 0, True),
        (lambda q, k: (k <= q) & (q != 3), 3, False),
    ],
    ids=["inverted", "inverted table", "the token itself hidden too", "one in the middle"],
)
def test_a_query_that_sees_no_key_is_told(keep: Mask, query: int, fill: float, tabled: bool) -> None:
    found = report(keep, fill, tabled)
    (entry,) = found.attention
    warning = f"1 of 7 queries see no key (query {query} is the first): is the mask inverted?"
    assert entry.warning == warning
    assert warning in str(found)


@pytest.mark.parametrize("tabled", [False, True])
@pytest.mark.parametrize(
    "keep",
    [
        lambda q, k: k <= q,
        lambda q, k: k >= q,
        lambda q, k: k != q,
        lambda q, k: k == q,
        lambda q, k: (q - k).abs() < 2,
        lambda q, k: q // 2 == k // 2,
    ],
    ids=["causal", "later tokens alone", "all but itself", "itself alone", "a band", "blocks"],
)
def test_a_mask_under_which_every_query_sees_a_key_is_not_warned_of(keep: Mask, tabled: bool) -> None:
    (entry,) = report(keep, tabled=tabled).attention
    assert not entry.warning


def test_a_mask_that_data_decide_is_not_warned_of() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~keep[:, None, None], -torch.inf).softmax(-1) @ v

    inputs = (*torch.randn(3, 2, 4, 7, 8), torch.zeros(2, 7, dtype=torch.bool))
    (found,) = attngraph.explain(model, *inputs).attention
    assert not found.warning


@pytest.mark.parametrize(("program", "query"), [("keep k > q", 4999), ("keep k < q", 0)])
def test_of_a_call_with_very_many_pairs_the_first_and_the_last_query_are_looked_at(
    program: str, query: int
) -> None:
    warning = warn_of_blind_rows(parse(f"s = dot; {program}"), (2, 4, 5000, 5000), ())
    assert warning == f"query {query} of 5000 sees no key: is the mask inverted?"


@pytest.mark.parametrize("program", ["keep k <= q", "keep q != 7"])
def test_other_queries_of_a_call_with_very_many_pairs_are_not_looked_at(program: str) -> None:
    assert not warn_of_blind_rows(parse(f"s = dot; {program}"), (2, 4, 5000, 5000), ())
