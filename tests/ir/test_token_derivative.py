"""The derivative of a token program is a token program: against PyTorch's derivative of the same formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngraph.ir.language.derivative import UnsupportedError
from attngraph.ir.language.token_derivative import GIVEN, GRADIENT, backward
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops.token_program import reference

PROGRAMS = {
    "gelu": """
        r0[2, t]
        r1[i0 < 2] = 0.5 * r0[i0, t] * (1.0 + tanh(0.8 * (r0[i0, t] + 0.04 * r0[i0, t] ** 3.0)))
        return r1[t, 2]""",
    "a norm after a sum": """
        r0[1, t, 8]
        r1[t, 8]
        r2[8]
        r3[8]
        r4[i0 < 8] = r0[0, t, i0] + r1[t, i0]
        r5[] = sum[j < 8] r4[j]
        r6[] = sum[j < 8] (r4[j] - r5[] / 8.0) ** 2
        r7[i0 < 8] = (r4[i0] - r5[] / 8.0) * rsqrt(r6[] / 8.0 + 1e-05) * r2[i0] + r3[i0]
        return r4[1, t, 8], r7[t, 8]""",
    "one value for many": """
        r0[t]
        r1[3, 4]
        r2[i0 < 3, i1 < 4] = exp(r0[t]) * r1[i0, i1]
        r3[i0 < 4] = sum[j < 3] r2[j, i0]
        r4[] = sum[j < 4] r0[t] * r0[t]
        return r2[3, 1, t, 4], r3[4, t], r4[t]""",
    "a product": """
        r0[t, 4]
        r1[3, 4]
        r2[i0 < 4] = sin(r0[t, i0])
        r3[i0 < 3] = sum[j < 4] r2[j] * r1[i0, j]
        r4[i0 < 3] = where(0.0 < r3[i0], r3[i0], 0.1 * r3[i0])
        return r4[t, 3]""",
    "turned, and the same twice": """
        r0[3, t, 4]
        r1[i0 < 4, i1 < 3] = sigmoid(r0[i1, t, i0])
        r2[i0 < 3, i1 < 4] = r1[i1, i0] * r0[i0, t, i1]
        return r1[4, t, 3], r2[t, 3, 4], r2[3, 1, t, 4]""",
}


def given_for(text: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ([5 if n is None else n for n in about.shape] for about in parse(text).given)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def of(text: str, *given: Tensor) -> list[Tensor]:
    found: list[Tensor] = torch.ops.attngraph.token_program(list(given), text)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_first_and_second_derivatives(name: str) -> None:
    text = PROGRAMS[name]
    given = given_for(text)
    assert backward(text, frozenset(range(len(given)))).program
    assert torch.autograd.gradcheck(lambda *g: of(text, *g), given)
    assert torch.autograd.gradgradcheck(lambda *g: of(text, *g), given)


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_gradients_are_those_of_pytorch(name: str) -> None:
    text = PROGRAMS[name]
    given = given_for(text, torch.float32)
    wanted = reference(parse(text), given)
    grads = [torch.randn_like(w) for w in wanted]
    found = torch.autograd.grad(of(text, *given), given, grads)
    exact = torch.autograd.grad(
        reference(parse(text), [g.double() for g in given]), given, [g.double() for g in grads]
    )
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_only_what_is_asked_for_is_computed_and_kept() -> None:
    """A sum that is a result is read, not computed again; gradients of a sum are those of the result."""
    made = backward(PROGRAMS["a norm after a sum"], frozenset((0, 3)))
    assert (GIVEN, 0) not in made.given and (GIVEN, 1) not in made.given
    assert made.gradients[3] == (GRADIENT, 1, True) and set(made.gradients) == {0, 3}
    added = "r0[t, 8]\nr1[t, 8]\nr2[i0 < 8] = r0[t, i0] + 2.0 * r1[t, i0]\nreturn r2[t, 8]"
    assert backward(added, frozenset((0,))).program == ""


def test_gradients_do_not_share_memory() -> None:
    text = "r0[t, 8]\nr1[1, t, 8]\nr2[i0 < 8] = 3.0 * (r0[t, i0] + r1[0, t, i0])\nreturn r2[t, 8]"
    given = given_for(text, torch.float32)
    of(text, *given)[0].sum().backward()
    grads: list[Any] = [g.grad for g in given]
    grads[0].zero_()
    assert torch.equal(grads[1], torch.full_like(grads[1], 3.0))


@pytest.mark.parametrize("line", [
    "r1[i0 < 4] = r0[t, 3 - i0]", "r1[i0 < 4] = r0[t, i0 % 2]", "r1[i0 < 2] = r0[t, i0]",
    "r1[i0 < 4] = amax[j < 4] r0[t, j]", "r1[i0 < 4] = r0[t, i0] // 2.0",
])  # fmt: skip
def test_what_has_no_derivative_is_refused(line: str) -> None:
    extent = line[8]
    with pytest.raises(UnsupportedError):
        backward(f"r0[t, 4]\n{line}\nreturn r1[t, {extent}]", frozenset((0,)))


def test_transformations_of_the_operation() -> None:
    """Forward mode, torch.func and batches of gradients, against PyTorch's operations."""
    text = PROGRAMS["a norm after a sum"]
    given = [g.detach() for g in given_for(text)]
    tangents = [torch.randn_like(g) for g in given]

    def formula(*g: Tensor) -> tuple[Tensor, ...]:
        return tuple(reference(parse(text), g))

    def ours(*g: Tensor) -> tuple[Tensor, ...]:
        return tuple(of(text, *g))

    wanted = torch.func.jvp(formula, tuple(given), tuple(tangents))
    torch.testing.assert_close(torch.func.jvp(ours, tuple(given), tuple(tangents)), wanted)
    with forward_ad.dual_level():
        pairs = [forward_ad.make_dual(g, t) for g, t in zip(given, tangents, strict=True)]
        found = [forward_ad.unpack_dual(f).tangent for f in ours(*pairs)]
        torch.testing.assert_close(found, list(wanted[1]))
    torch.testing.assert_close(torch.func.jacrev(ours)(*given), torch.func.jacrev(formula)(*given))
    many = [torch.stack([g, g * 2]) for g in given]
    torch.testing.assert_close(torch.vmap(ours)(*many), torch.vmap(formula)(*many))
    leaves = [g.requires_grad_() for g in given]
    basis = torch.eye(40, dtype=torch.float64).view(40, 5, 8)
    batches = (
        torch.autograd.grad(f(*leaves)[1], leaves, basis, is_grads_batched=True) for f in (ours, formula)
    )
    torch.testing.assert_close(*batches)
