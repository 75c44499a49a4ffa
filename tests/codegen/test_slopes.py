"""The gradients of the kernels that all others are compared with are the slopes of their results, by small
differences in float64."""

import pytest
import torch
from torch import Tensor

import attngraph.codegen

from .conformance.programs import CASES, Shape

assert attngraph.codegen is not None
SLOPED = (
    "scaled", "causal", "causal by division", "window, wider behind", "padding", "documents", "fill of -1e9",
    "fill relative to the score", "fill of a larger multiple", "hard mask, then a score", "softcap",
    "score over score", "functions", "slopes", "slopes of the head's number", "scales", "one number", "bias",
    "bias of all batches", "bias of keys", "biases of heads", "biases that are multiplied", "by distance",
    "by distance, heads last", "by a distance in range", "by a distance's bucket", "by a bucket of the pair",
    "by a kind of key", "by blocks", "several statements", "functions of what is read",
    "hidden by what is read", "fill that is read", "sink", "sink of a formula", "sink of each row", "dropout",
    "weights halved", "weights masked", "gates of heads", "gates of keys", "gates of pairs",
)  # fmt: skip
"""Programs of which every row sees a key, even among five, so that their results have slopes."""


@pytest.mark.parametrize("kernel", ["reference", pytest.param("cpu.tiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SLOPED)
def test_gradients_are_the_slopes_of_results(name: str, kernel: str) -> None:
    call = CASES[name].of(Shape(2, 2, 1, 5, 3, 2), torch.float64)
    inputs = [t.requires_grad_(t.is_floating_point()) for t in (*call.operands, *call.reads)]

    def results(q: Tensor, k: Tensor, v: Tensor, *reads: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.attngraph.attention(q, k, v, list(reads), call.sizes, call.text, kernel)

    assert torch.autograd.gradcheck(results, inputs)
