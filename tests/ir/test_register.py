"""Functions added to the score language: used like its own, and refused where what is said is untrue."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.ir.language import FUNCTIONS, Operation, register_function
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.rule import RULES, Category, rule

EXPM1 = Operation(
    "expm1", 1, torch.expm1, "reals", "float", "rising", ("f + 1.0",), "expm1f({0})", "(tl.exp({0}) - 1.0)"
)  # fmt: skip


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [(t, dict(t)) for t in (FUNCTIONS, RULES)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.lgamma((q @ k.mT).abs() + 1), -1) @ v


def test_a_function_from_outside_is_fused_with_its_gradient() -> None:
    q, k, v = torch.randn(3, 1, 2, 33, 8, dtype=torch.float64).unbind()
    assert not attngraph.explain(attend, q, k, v).attention

    @rule(Category.POINTWISE, "lgamma.default")
    def lgamma(context: Any, node: Any, at: Any) -> Any:
        return M.function("lgamma", context.read_broadcast(node.args[0], at))

    register_function(
        Operation("lgamma", 1, torch.lgamma, "reals", "float", None, (), "lgammaf({0})", "f({0})")
    )
    compiled = attngraph.compile(attend, min_scores=0)
    mine, theirs = (q.clone().requires_grad_() for _ in range(2))
    found, wanted = compiled(mine, k, v), attend(theirs, k, v)
    torch.testing.assert_close(found, wanted)
    assert "lgamma(abs(dot) + 1)" in compiled.report.attention[0].program
    for result in (found, wanted):
        result.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"slopes": ("f",)}, "slope 0, 'f', is not the derivative where x is -4"),
        ({"interval": (0.0, 1.0)}, "values are not between 0.0 and 1.0"),
        ({"torch": lambda x: -x}, "it is not rising"),
        ({"torch": lambda x: x.sum()}, "of float64 numbers it gives"),
        ({"c": "expm1f()"}, "its text in C has no place for each operand"),
        ({"name": "exp"}, "'exp' is taken"),
        ({"name": "a b"}, "no name"),
        ({"takes": "integers"}, "a function of one or two real numbers"),
    ],
)
def test_what_is_not_so_is_refused_and_leaves_nothing(changed: dict[str, Any], told: str) -> None:
    before = dict(FUNCTIONS)
    with pytest.raises(ValueError, match=told):
        register_function(dataclasses.replace(EXPM1, **changed))
    assert before == FUNCTIONS
