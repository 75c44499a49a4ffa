"""Factors stay where the model multiplies by them, if their product leaves the range in which it computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.ir.language.parser import parse

F = torch.nn.functional
Made = tuple[Callable[..., Tensor], tuple[float, ...]]


def operands(*sizes: float) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 40, 8) * size for size in sizes]


def spellings(c: float) -> dict[str, Made]:
    """Attentions whose operands and scores are in range, with the sizes of their operands."""
    return {
        "both sides": (lambda q, k, v: ((q / c) @ (k / c).mT).softmax(-1) @ v, (c, c, 1)),
        "one side": (lambda q, k, v: (q @ (k / c).mT).softmax(-1) @ v, (1, c, 1)),
        "in turns": (lambda q, k, v: ((q / c**0.5 / c**0.5) @ (k / c).mT).softmax(-1) @ v, (c, c, 1)),
        "before and after": (lambda q, k, v: ((q / c) @ k.mT * c).softmax(-1) @ v, (1, 1, 1)),
        "after": (lambda q, k, v: ((q @ k.mT) / c).softmax(-1) @ v, (c, 1, 1)),
        "a cap": (lambda q, k, v: (9 * torch.tanh((q / c) @ (k / c).mT / 9)).softmax(-1) @ v, (c, c, 1)),
        "a bias": (
            lambda q, k, v: ((q / c) @ (k / c).mT + k[..., :1].mT / c).softmax(-1) @ v, (c, c, 1)
        ),
        "two products": (
            lambda q, k, v: ((q / c) @ (k / c).mT + (q / c) @ v.mT).softmax(-1) @ v, (c, c, 1)
        ),
        "numbers for vectors": (
            lambda q, k, v: ((q / c)[..., :1] * (k / c)[..., :1].mT).softmax(-1) @ v, (c, c, 1)
        ),
        "a number for each key": (
            lambda q, k, v: ((q @ v.mT) * ((k / c)[..., :1] * (k / c)[..., 1:2]).mT).softmax(-1) @ v,
            (1, c, 1)
        ),
        "values": (lambda q, k, v: (q @ k.mT / 3).softmax(-1) @ (v / c), (1, 1, c)),
        "no softmax": (lambda q, k, v: ((q / c) @ (k / c).mT).tril() @ v, (c, c, 1)),
        "scale": (lambda q, k, v: F.scaled_dot_product_attention(q / c, k, v, scale=c), (1, 1, 1)),
    }  # fmt: skip


@pytest.mark.parametrize("c", [1e30, 1e-30, 1e15])
@pytest.mark.parametrize("name", spellings(1.0))
def test_scores_that_are_in_range_stay_there(name: str, c: float) -> None:
    model, sizes = spellings(c)[name]
    given = operands(*sizes)
    exact = model(*(t.double() for t in given))

    def error(found: Tensor) -> float:
        return float((found - exact).abs().max())

    found = attngraph.compile(model, min_scores=0)(*given)
    assert error(found) <= 2 * error(model(*given)) + 1e-6 * float(exact.abs().max())


def test_usual_factors_are_still_multiplied_together() -> None:
    compiled = attngraph.compile(lambda q, k, v: ((q / 8) @ (k / 1000).mT).softmax(-1) @ v, min_scores=0)
    compiled(*operands(1, 1, 1))
    (attention,) = compiled.report.attention
    assert "s = 0.000125 * dot" in attention.program
    assert parse("s = 0.000125 * dot").scale == 0.000125 and parse("s = 1e-20 * dot").scale is None
