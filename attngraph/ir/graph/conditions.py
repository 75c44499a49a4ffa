"""Evaluates the relations between symbolic sizes that a graph assumes, for concrete sizes."""

import fractions
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter


def holds(condition: Any, sizes: Mapping[str, int]) -> bool:
    """Whether a sympy relation is true for these sizes; also True if sizes are missing. One that divides by
    a size of zero says nothing about it, so it is not true of it."""
    names, test = test_of(condition)
    if any(name not in sizes for name in names):
        return True
    try:
        return bool(test(*(sizes[name] for name in names)))
    except ZeroDivisionError:
        return False


def are_few(conditions: Sequence[Any], size: str) -> bool:
    """Whether conditions on one size hold for neither small numbers nor large ones."""
    tried = (range(2, 6), range(1 << 24, (1 << 24) + 64))
    return not any(all(holds(c, {size: n}) for c in conditions) for numbers in tried for n in numbers)


@functools.lru_cache(maxsize=1 << 14)
def test_of(condition: Any) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """The symbol names of a relation, and the relation compiled to a Python function of their values, which
    is about a thousand times faster than sympy's substitution. Symbol names do not appear in the code."""
    symbols = sorted(condition.free_symbols, key=str)
    names = tuple(map(str, symbols))
    if any(not _is_printed(f) for f in condition.atoms(sympy.Function)):
        return names, lambda *sizes: condition.subs(dict(zip(symbols, sizes, strict=True))) is not sympy.false
    printer = _PlacesForNames({symbol: f"_{place}" for place, symbol in enumerate(symbols)})
    code = f"lambda {', '.join(printer.places.values())}: {printer.doprint(condition)}"
    return names, eval(code, {"math": math, "torch": torch, "Fraction": fractions.Fraction})


def python_text(condition: Any) -> str:
    """A relation as a Python expression of its symbols."""
    return PythonPrinter().doprint(condition)  # type: ignore[no-any-return]


def _is_printed(formula: Any) -> bool:
    """Whether torch's printer supports the function; it prints unsupported ones as plain Python calls."""
    return hasattr(PythonPrinter, f"_print_{type(formula).__name__}")


class _PlacesForNames(PythonPrinter):
    """Torch's printer of formulas as Python code, with numbered parameters for symbols and exact division."""

    def __init__(self, places: Mapping[Any, str]) -> None:
        super().__init__()
        self.places = places

    def _print_Symbol(self, symbol: Any) -> str:  # noqa: N802
        return self.places[symbol]

    def _print_Rational(self, number: Any) -> str:  # noqa: N802
        return f"Fraction({number.p}, {number.q})"

    def _print_Pow(self, power: Any) -> str:  # noqa: N802
        base, exponent = map(self._print, power.args)
        return f"(Fraction({base}) ** ({exponent}))" if power.exp.is_negative else super()._print_Pow(power)
