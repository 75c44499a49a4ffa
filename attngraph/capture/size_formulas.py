"""Stops a trace whose formulas of symbolic sizes become too long.

Window partitions, strides and paddings of an image's sides give formulas of nested quotients and
remainders. torch compares them at every operation, which takes seconds for each. With numbers in place of
these sizes, the same trace takes milliseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attngraph.capture.replaced import replaced
from attngraph.ir import budgets


class LongFormula(Exception):
    """A formula of sizes is longer than the budget. `symbols`: the names of the sizes in its innermost
    quotients and remainders, or of all where there are none."""

    def __init__(self, symbols: frozenset[str]) -> None:
        super().__init__("formulas of its sizes become too long")
        self.symbols = symbols


@contextlib.contextmanager
def short_formulas() -> Iterator[None]:
    """Raise LongFormula where torch is about to evaluate one."""
    evaluate = ShapeEnv.evaluate_expr
    short: set[Any] = set()

    def evaluated(self: ShapeEnv, formula: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(formula, sympy.Basic) and formula not in short:
            if formula.count_ops() > budgets.SIZE_OPS:
                parts = formula.atoms(sympy.Function)
                innermost = [p for p in parts if not any(arg.has(sympy.Function) for arg in p.args)]
                symbols = {s for part in innermost or (formula,) for s in part.free_symbols}
                raise LongFormula(frozenset(map(str, symbols)))
            short.add(formula)
        return evaluate(self, formula, *args, **kwargs)

    with replaced(ShapeEnv, "evaluate_expr", evaluated):
        yield
