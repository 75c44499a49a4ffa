"""Relations between sizes that a graph takes for granted, judged for given numbers."""

from __future__ import annotations

import fractions
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter


def holds(condition: Any, sizes: Mapping[str, int]) -> bool:
    """Whether a sympy relation is true (or cannot be judged) for these sizes."""
    names, test = _compiled(condition)
    return any(name not in sizes for name in names) or bool(test(*(sizes[name] for name in names)))


@functools.lru_cache(maxsize=1 << 14)
def _compiled(condition: Any) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """The names in a relation, and the relation as a function of their numbers: sympy needs a thousand times
    as long to put numbers in and simplify. Names of symbols do not become part of the code."""
    symbols = sorted(condition.free_symbols, key=str)
    names = tuple(map(str, symbols))
    if any(not _is_printed(f) for f in condition.atoms(sympy.Function)):
        return names, lambda *sizes: condition.subs(dict(zip(symbols, sizes, strict=True))) is not sympy.false
    printer = _PlacesForNames({symbol: f"_{place}" for place, symbol in enumerate(symbols)})
    code = f"lambda {', '.join(printer.places.values())}: {printer.doprint(condition)}"
    return names, eval(code, {"math": math, "torch": torch, "Fraction": fractions.Fraction})


def _is_printed(formula: Any) -> bool:
    """Whether torch's printer knows the function; it writes others down as if Python had them."""
    return hasattr(PythonPrinter, f"_print_{type(formula).__name__}")


class _PlacesForNames(PythonPrinter):
    """Torch's printer of formulas as Python, for places in place of names, with exact quotients."""

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
