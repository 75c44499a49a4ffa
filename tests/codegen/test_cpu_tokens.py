"""Token programs computed by C, against the reference: products, folds, selections, many tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu.tokens import run
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops.token_program import reference

ROWS = (*range(1, 10), 17, 31, 32, 33, 600)


def check(text: str, tokens: int, given: list[Tensor] | None = None) -> None:
    """The C's results are those of the reference in float64."""
    program = parse(text)
    assert parse(program.text) == program
    generator = torch.Generator().manual_seed(0)
    if given is None:
        given = [
            torch.randn([tokens if n is None else n for n in about.shape], generator=generator)
            / (max(n or 1 for n in about.shape) ** 0.5 if about.token_dim is None else 1)
            for about in program.given
        ]  # weights that keep the size of values
    found = run.Tokens().run(text, given)
    assert found is not None
    wanted = reference(program, [t.double() for t in given])
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def product(depth: int, width: int, turned: bool) -> str:
    weight, index = (f"{depth}, {width}", "j, i0") if turned else (f"{width}, {depth}", "i0, j")
    return (
        f"r0[1, t, {depth}]\nr1[{weight}]\nr2[{width}]\nr3[i0 < {depth}] = r0[0, t, i0] * 2.0\n"
        f"r4[i0 < {width}] = sum[j < {depth}] r3[j] * r1[{index}]\nr5[i0 < {width}] = tanh(r4[i0]) + r2[i0]\n"
        f"return r5[1, t, {width}], r4[t, {width}]"
    )


@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(64, 96), (37, 53), (16, 3), (768, 129), (5, 1000)])
def test_products(depth: int, width: int, turned: bool, tokens: int) -> None:
    check(product(depth, width, turned), tokens)
