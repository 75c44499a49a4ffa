"""A function of one number between the scores and their softmax is looked into, torch's compositions too."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attngraph

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mish": F.mish, "hardswish": F.hardswish, "celu": F.celu, "softshrink": F.softshrink,
    "sinc": torch.sinc, "atan": torch.atan, "asinh": torch.asinh, "erfc": torch.erfc,
    "hypot": lambda s: torch.hypot(s, s * 0.5), "copysign": lambda s: torch.copysign(s, s.tanh()),
    "fmax": lambda s: torch.fmax(s, -s),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_scores_is_fused_with_its_gradient(name: str) -> None:
    def model(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x @ x.mT * 0.3).softmax(-1) @ x

    compiled = attngraph.compile(model, min_scores=0)
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    found, wanted = compiled(x), model(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (found, wanted)))
    assert len(compiled.report.attention) == 1


def test_a_mask_is_no_function_of_rounded_places() -> None:
    """What a composition compares is a formula of places that float32 rounds: it is not taken for exact."""

    def model(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).float() / 10
        hidden = F.hardshrink(places - places[:, None], 0.3)
        return (x @ x.mT + hidden).softmax(-1) @ x

    compiled = attngraph.compile(model, min_scores=0)
    for tokens in (9, 40):
        x = torch.randn(2, tokens, 8)
        torch.testing.assert_close(compiled(x), model(x))
