"""What a backward pass computes on a GPU."""

import itertools

import pytest
import torch

import attngraph
from workshop.standin.plugin import DEVICE

PROGRAM = "s = 0.25 * dot + r0[h]\nkeep k <= q"
CASES = [case for case in itertools.product((True, False), repeat=4) if any(case)]


def _gradients(wanted: tuple[bool, ...]) -> tuple[int, list[torch.Tensor]]:
    """How many kernels of Triton compute the gradients of q, k, v and a read, and these."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 20, 16) for _ in range(3)] + [torch.randn(2)]
    for tensor, is_wanted in zip(inputs, wanted, strict=True):
        tensor.requires_grad_(is_wanted)
    *operands, read = inputs
    out = attngraph.attention(*operands, PROGRAM, read)
    asked, before = [t for t in inputs if t.requires_grad], DEVICE.kernels
    found = torch.autograd.grad(out.square().sum(), asked)
    return DEVICE.kernels - before, list(found)


@pytest.mark.parametrize("wanted", CASES)
def test_gradients_that_nobody_wants_are_not_computed(wanted: tuple[bool, ...]) -> None:
    _, every = _gradients((True,) * 4)
    kernels, found = _gradients(wanted)
    torch.testing.assert_close(found, [g for g, w in zip(every, wanted, strict=True) if w])
    assert kernels == 1 + any(wanted[1:3])
