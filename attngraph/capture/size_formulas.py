"""Stops a trace whose formulas of symbolic sizes become too long.

Window partitions, strides and paddings of an image's sides give formulas of nested quotients and
remainders. torch compares them at every operation, which takes seconds for each. With numbers in place of
these sizes, the same trace takes milliseconds. Sums and products of sizes are cheap however long they are, so
only what is inside of a quotient or a remainder counts.
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
    """A quotient or remainder of sizes is longer than the budget. `symbols`: the names of the sizes in the
    innermost quotients and remainders of its formula."""

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
            parts = formula.atoms(sympy.Function)
            if any(part.count_ops() > budgets.SIZE_OPS for part in parts):
                innermost = [p for p in parts if not any(arg.has(sympy.Function) for arg in p.args)]
                symbols = {s for part in innermost for s in part.free_symbols}
                raise LongFormula(frozenset(map(str, symbols)))
            short.add(formula)
        return evaluate(self, formula, *args, **kwargs)

    with replaced(ShapeEnv, "evaluate_expr", evaluated):
        yield
