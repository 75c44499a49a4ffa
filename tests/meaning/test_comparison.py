"""Comparing two tensors sees every difference, says where it is, and judges by the rule it is given."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attngraph.meaning.check.comparison import EXACT, FLASH, Rule, compare, elementwise

X = torch.tensor([[1.0, -2.0], [math.nan, math.inf]], dtype=torch.float64)


def changed(place: tuple[int, int], value: float) -> Tensor:
    found = X.clone()
    found[place] = value
    return found


def test_equal_tensors_hold_by_every_rule() -> None:
    for x in (X, X.float(), X.nan_to_num().long(), X > 0, X[:0], X[0, 0], torch.complex(X, X)):
        for rule in (EXACT, FLASH, elementwise(1e-9), Rule(1e-9, floor=1.0)):
            result = compare(x.clone(), x, rule)
            assert result.holds
            assert (result.error, result.relative, str(result)) == (0.0, 0.0, "")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (X.float(), "another dtype: torch.float32 instead of torch.float64"),
        (X[None], "another shape: [1, 2, 2] instead of [2, 2]"),
        (changed((0, 1), math.nan), "NaN in other places: 2 instead of 1, first at [0, 1]"),
        (changed((1, 0), math.inf), "NaN in other places: 0 instead of 1, first at [1, 0]"),
        (changed((1, 1), -math.inf), "infinities in other places: 1 instead of 1, first at [1, 1]"),
        (changed((1, 1), 1e300), "infinities in other places: 0 instead of 1, first at [1, 1]"),
        (changed((0, 1), -2.5), "-2.5 instead of -2 at [0, 1]"),
    ],
)
def test_what_differs_is_said_with_its_place(found: Tensor, said: str) -> None:
    result = compare(found, X, elementwise(1e-3))
    assert not result.holds
    assert str(result) == said


def test_integers_are_equal_or_not() -> None:
    a, b = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert str(compare(a, b, Rule(1.0))) == "another value: 3 instead of 4 at [2]"
    assert not compare(a > 2, b > 1, Rule(1.0)).holds


def test_an_error_too_large_for_float64_is_no_agreement() -> None:
    most = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert not compare(-most, most, elementwise(1e-3)).holds


def test_a_rule_says_what_an_error_is_held_against() -> None:
    wanted = torch.tensor([100.0, 0.0], dtype=torch.float64)
    found = wanted + torch.tensor([0.0, 0.5], dtype=torch.float64)
    assert compare(found, wanted, Rule(0.005)).holds  # of the largest, 100
    assert not compare(found, wanted, Rule(0.004)).holds
    assert compare(found, wanted, elementwise(0.5)).holds  # of 1 + 0
    assert not compare(found, wanted, elementwise(0.4)).holds
    assert compare(found, wanted, elementwise(0.4, added=1.0)).holds
    assert compare(found * 1e-3, wanted * 1e-3, Rule(5e-4, floor=1.0)).holds
    assert not compare(found, wanted).holds


def test_by_the_flash_rule_the_error_is_at_most_twice_that_of_eager() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager = (exact + 1e-3).float()
    assert compare((exact - 1.9e-3).float(), exact, FLASH, eager).holds
    assert not compare((exact - 2.1e-3).float(), exact, FLASH, eager).holds


def test_where_the_exact_answer_has_no_number_eager_is_what_counts() -> None:
    exact, eager = torch.tensor([1.0, math.nan], dtype=torch.float64), torch.tensor([1.0, 5.0])
    assert compare(eager.clone(), exact, FLASH, eager).holds
    result = compare(torch.tensor([1.0, 5.1]), exact, FLASH, eager)
    assert "where the float64 model gives NaN" in result.problem
    assert result.detail == "5.1 instead of 5 at [1]"
