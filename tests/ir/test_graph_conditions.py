"""Relations between sizes, as numbers are put into them: `holds`."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from torch.utils._sympy import functions as torch_functions

from attngraph.ir.graph.formula import holds

N = sympy.Symbol("n", integer=True, positive=True)


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        (torch_functions.ToFloat(N), 9.0),
        (torch_functions.OpaqueUnaryFn_sqrt(N), 3.0),
        (torch_functions.OpaqueUnaryFn_log2(N), 3.169925001442312),
        (torch_functions.FloorDiv(N, 2), 4),
        (torch_functions.Where(N > 8, 7, 1), 7),
    ],
)
def test_a_relation_holds_for_sizes_as_torch_computes_its_functions(formula: Any, value: float) -> None:
    assert holds(sympy.Ge(formula, value - 0.01), {"n": 9})
    assert not holds(sympy.Ge(formula, value + 0.01), {"n": 9})
