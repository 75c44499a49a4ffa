"""The functions of c/functions.h against float64: units in the last place, and their edges."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attngraph.codegen.cpu import toolchain
from attngraph.codegen.cpu.native import header

SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e-40, 8.0, 0.125)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, tuple[float, float]]] = {
    "exp_": (torch.exp, 1.1, (-87.0, 88.0)), "exp2_": (torch.exp2, 1.1, (-126.0, 127.0)),
    "tanh_": (torch.tanh, 2.0, (-9.0, 9.0)), "erf_": (torch.erf, 1.2, (-5.0, 5.0)),
    "log_": (torch.log, 1.0, (1e-30, 1e30)), "log2_": (torch.log2, 1.9, (1e-30, 1e30)),
}  # fmt: skip
"""By their name in C: what they are, units in the last place, and the range."""


def computed(name: str, x: Tensor) -> Tensor:
    head = "void each(const float *x, float *y, int64_t n)"
    loop = f"{head} {{ for (int64_t i = 0; i < n; ++i) y[i] = {name}(x[i]); }}"
    code, _ = toolchain.build("\n".join(["#define FLOAT32", header("functions.h"), loop]))
    y = torch.empty_like(x)
    code.each(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_c_are_within_units_in_the_last_place(name: str) -> None:
    function, units, (low, high) = FUNCTIONS[name]
    inside = torch.linspace(low, high, 1 << 20) if low < 0 else torch.logspace(-30, 30, 1 << 20)
    x = torch.cat([inside, torch.linspace(0.25, 4, 1 << 20)])
    want = function(x.double())
    ahead = (
        torch.nextafter(want.float().abs(), torch.tensor(torch.inf)).double() - want.float().abs().double()
    )
    assert float(((computed(name, x).double() - want).abs() / ahead).max()) <= units


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_c_have_the_edges_of_pytorchs(name: str) -> None:
    x = torch.tensor(SPECIAL)
    found, want = computed(name, x), FUNCTIONS[name][0](x)
    torch.testing.assert_close(found, want, rtol=2e-7, atol=0.0, equal_nan=True)
