"""What a score says of infinite or undefined dots is left out; what tensors hold is not assumed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import parse
from attngraph.ir.language.score import Score
from attngraph.meaning.algebra import M
from attngraph.meaning.masks.score_bounds import with_finite_dots


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


def hidden(q: Tensor) -> Tensor:
    tokens = q.shape[-2]
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def numbers_before_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.triu(torch.full((q.shape[-2], q.shape[-2]), -math.inf), 1)
    return (torch.nan_to_num(q @ k.mT / 2) + later).softmax(-1) @ v


def numbers_after_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / 2).masked_fill(hidden(q), -math.inf)
    return torch.nan_to_num(scores, neginf=-1e9).softmax(-1) @ v


def no_numbers_replaced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 2
    scores = torch.where(torch.isnan(scores) | torch.isinf(scores), torch.zeros_like(scores), scores)
    return scores.masked_fill(hidden(q), -math.inf).softmax(-1) @ v


def zero_where_hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / 2).masked_fill(hidden(q), -math.inf)
    return scores.softmax(-1).masked_fill(scores == -math.inf, 0.0) @ v


@pytest.mark.parametrize(
    "model", [numbers_before_the_mask, numbers_after_the_mask, no_numbers_replaced, zero_where_hidden]
)
def test_models_that_ask_have_the_program_of_those_that_do_not(model: Callable[..., Tensor]) -> None:
    compiled = attngraph.compile(model)
    for tokens in (9, 12):
        given = torch.randn(3, 2, 4, tokens, 8, dtype=torch.float64).unbind()
        torch.testing.assert_close(compiled(*given), model(*given), rtol=0, atol=1e-10)
    (found,) = compiled.report.attention
    assert found.program.startswith("s = 0.5 * dot\nkeep k <= q")
    assert "isnan" not in found.program
    assert "dot ==" not in found.program
