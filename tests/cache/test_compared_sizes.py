"""Models that ask for the number itself of a size: their graphs at several sizes are compared."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngraph.capture.compared import SIZES, interpolated
from attngraph.errors import CaptureError


@given(st.tuples(*[st.integers(-5, 5)] * 4))
def test_a_number_is_interpolated(formula: tuple[int, int, int, int]) -> None:
    constant, rows, tokens, both = formula
    numbers = [constant + rows * r + tokens * t + both * r * t for r, t in SIZES]
    assert interpolated(numbers) == formula


@pytest.mark.parametrize("number", [lambda r, t: t * t, lambda r, t: t // 2, lambda r, t: max(r, 3)])
def test_a_number_of_another_form_is_refused(number: Any) -> None:
    with pytest.raises(CaptureError, match="a number is"):
        interpolated([number(r, t) for r, t in SIZES])
