"""What a score says of infinite or undefined dots is left out; what tensors hold is not assumed."""

from __future__ import annotations

import pytest

from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import Score
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.attention.finite_scores import with_finite_dots


def score(text: str) -> Expr:
    (statement,) = parse(f"s = {text}").statements
    assert isinstance(statement, Score)
    return M.canonical(statement.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("where(isnan(0.5 * dot), 0, 0.5 * dot)", "0.5 * dot"),
        ("where(0.5 * dot - 0.1 * q == -inf, -9, 0.5 * dot)", "0.5 * dot"),
        ("where(dot == inf, 9, where(dot == -inf, -9, where(isnan(dot), 0, dot)))", "dot"),
        ("where(-inf <= tanh(dot), dot, 0)", "dot"),
        ("where(inf <= dot, 0, dot)", "dot"),
        ("where(isnan(where(k <= q, dot, -9)), 0, dot)", "dot"),
    ],
)
def test_a_dot_is_a_number(text: str, wanted: str) -> None:
    assert with_finite_dots(score(text)) is score(wanted)


@pytest.mark.parametrize(
    "text",
    [
        "where(isnan(dot + r0[q, k]), 0, dot + r0[q, k])",
        "where(r0[k] == -inf, 0, dot)",
        "where(isnan(exp(dot)), 0, dot)",
        "where(isnan(dot / r0[h]), 0, dot)",
        "where(dot == 0, -inf, dot)",
        "where(where(k <= q, dot, -inf) == 5, 0, dot)",
    ],
)
def test_what_may_be_infinite_or_undefined_is_left(text: str) -> None:
    assert with_finite_dots(score(text)) is score(text)
