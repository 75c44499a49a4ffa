"""Stops a trace whose formulas of symbolic sizes become too long.

Window partitions, strides and paddings of an image's sides give formulas of nested quotients and
remainders. torch compares them at every operation, which takes seconds for each. With numbers in place of
these sizes, the same trace takes milliseconds. Sums and products of sizes are cheap however long they are, so
only what is inside of a quotient or a remainder counts.

It also stops a trace that must hold for any number of tokens where it is about to hold for some alone, and
once where it may come to that: where it has looked at many quotients of that number (chunks, paddings).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attngraph.capture.instead import replaced
from attngraph.ir import budgets


class SizeProblem(Exception):
    """Sizes are better numbers. `symbols`: their names."""

    def __init__(self, symbols: frozenset[str]) -> None:
        super().__init__(self.__doc__)
        self.symbols = symbols


class LongFormula(SizeProblem):
    """formulas of its sizes become too long"""


class FixedSize(SizeProblem):
    """how often a loop runs, or another plain number, follows from how many tokens there are"""


class ManyQuotients(SizeProblem):
    """it looks at many quotients of how many tokens there are"""


@functools.lru_cache(maxsize=1 << 12)
def _names(formula: sympy.Expr) -> frozenset[str]:
    return frozenset(map(str, formula.free_symbols))


@contextlib.contextmanager
def short_formulas(
    kept: Callable[[frozenset[str]], object] = lambda symbols: False, any_number: bool = True
) -> Iterator[None]:
    """Raise LongFormula where torch is about to evaluate one whose quotients or remainders exceed the budget
    (with the sizes in the innermost of these), and FixedSize where it is about to make a number of a formula
    of sizes of which `kept` is true. Without `any_number`, also ManyQuotients of such sizes."""
    evaluate = ShapeEnv.evaluate_expr
    short: set[Any] = set()
    quotients: set[Any] = set()

    def evaluated(self: ShapeEnv, formula: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(formula, sympy.Expr) and kept(names := _names(formula)):
            raise FixedSize(names)
        if isinstance(formula, sympy.Basic) and formula not in short:
            parts = formula.atoms(sympy.Function)
            if any(part.count_ops() > budgets.SIZE_OPS for part in parts):
                innermost = [p for p in parts if not any(arg.has(sympy.Function) for arg in p.args)]
                symbols = {s for part in innermost for s in part.free_symbols}
                raise LongFormula(frozenset(map(str, symbols)))
            short.add(formula)
            if not any_number and parts and kept(names := _names(formula)):
                quotients.add(formula)
                if len(quotients) > budgets.QUOTIENTS_OF_TOKENS:
                    raise ManyQuotients(names)
        return evaluate(self, formula, *args, **kwargs)

    with replaced(ShapeEnv, "evaluate_expr", evaluated):
        yield
