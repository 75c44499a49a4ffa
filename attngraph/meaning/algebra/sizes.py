"""Sizes as expressions: from the sympy formulas that graphs hold to the language of the IR, and back.

Sizes are whole numbers. A formula that may not be whole, or that has no counterpart here, is refused.

Where torch cannot follow a size as a symbol, a graph has an example of it: a number that is a size of nothing
else. Within `example_size` that number stands for a size, which its digits name, so that nothing is concluded
from how small the example is: among 11 tokens, `q - k < 48` keeps its bound.

Sizes that are equal have one name (`SizeNames`), by the relations that a trace found: `n == m` lets `m` stand
for `n`, and one that speaks of a symbol by itself, `n == 9 - max(0, 9 - n)`, says what another part of it is.
A name never contains what it stands for, so replacing ends. What is no such relation (`2 * n == 3 * m`)
renames only a formula that is one of its sides.
"""

import contextlib
import contextvars
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch

from attngraph.ir.kept import holding
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.rule import Unliftable


class SizeNames:
    """The names by the sympy relations in `conditions`; those of other forms say nothing here."""

    def __init__(self, conditions: Iterable[Any]) -> None:
        self._names: dict[Expr, Expr] = {}
        equal = [c.args for c in conditions if isinstance(c, sympy.Eq)]
        # Symbols come first, so that what is found of formulas is told of symbols that keep their names.
        for sides in sorted(equal, key=lambda sides: not all(s.is_Symbol or s.is_Number for s in sides)):
            with contextlib.suppress(Unliftable):
                self._learn(*(self.of(from_sympy(side)) for side in sides))

    def __bool__(self) -> bool:
        return bool(self._names)

    def _learn(self, a: Expr, b: Expr) -> None:
        found = _named(a, b) or _named(b, a) or _solved(a, b)
        if found is None and a.op != "const" and not _contains(b, a):
            found = a, b
        if found is not None:
            self._names[found[0]] = found[1]

    def of(self, size: Expr) -> Expr:
        """A size, or a formula of sizes, in the names that stand for all that are equal to them."""
        if not self._names or size.op == "const":
            return size
        return E.rebuild(size, lambda n, args: self._whole(M.construct(n, args)))

    def _whole(self, size: Expr) -> Expr:
        while size in self._names:
            size = self.of(self._names[size])
        return size


def _named(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """A symbol, and the formula without it that it equals."""
    return (a, b) if a.op == "size" and not _contains(b, a) else None


def _contains(formula: Expr, part: Expr) -> bool:
    return any(n is part for n in E.walk(formula))


def _solved(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """A symbol that is a product of others, or the only part that is no symbol, and what it equals."""
    terms = ranges.subtract(ranges.polynomial(a), ranges.polynomial(b))
    common = math.gcd(*terms.values())
    alone = {atoms[0]: n // common for atoms, n in terms.items() if len(atoms) == 1}
    parts = [n for atoms in terms for n in atoms if n.op != "size"]
    symbols = [n for n in alone if n.op == "size" and len(terms) <= 2]
    for whole in (*symbols, *(parts if len(parts) == 1 else ())):
        rest = {atoms: n // common for atoms, n in terms.items() if atoms != (whole,)}
        found = M.from_polynomial({atoms: -alone.get(whole, 0) * n for atoms, n in rest.items()})
        if abs(alone.get(whole, 0)) == 1 and not _contains(found, whole):
            return whole, found
    return None


NO_FORMULA = "a size that is no formula of whole numbers"
_LARGEST_DIVISOR = 1 << 10
_EXAMPLE = contextvars.ContextVar("_EXAMPLE", default=0)


def example_size(number: int) -> contextlib.AbstractContextManager[int]:
    """Within this, `number` and its multiples are expressed by a size that may be any; 0: no number is."""
    return holding(_EXAMPLE, number)


def example_number() -> int:
    """The number that stands for a size; 0 if none does."""
    return _EXAMPLE.get()


def is_example(size: Expr) -> bool:
    """Whether a size is one of which a graph has only an example; its name is that number."""
    return size.op == "size" and str(size.value).isdecimal()


def size_expression(value: Any) -> Expr:
    """A size (int, SymInt or sympy expression) as an expression over named sizes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _whole_number(value)
    if isinstance(value, (bool, float)):
        return E.const(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        value = value.node.expr
    return from_sympy(value)


def _whole_number(value: int) -> Expr:
    example = _EXAMPLE.get()
    if example and value and value % example == 0:
        return M.mul(E.const(value // example), E.size(str(example)))
    return E.const(value)


def from_sympy(value: Any) -> Expr:
    return _from_sympy(value, str(type(value)), example_number())


@functools.lru_cache(maxsize=1 << 12)
def _from_sympy(value: Any, _: str, __: int) -> Expr:
    """The expression of a formula of sizes; its kind and the example are told for the table alone."""
    if value.is_Symbol:
        return E.size(str(value))
    if value.is_Integer:
        return _whole_number(int(value))
    if value.is_Number:
        return E.const(float(value))
    name = type(value).__name__
    if name in ("CeilToInt", "FloorToInt", "TruncToInt", "RoundToInt"):
        whole = _without_floats(value.args[0])
        return _rounded_quotient(name, value.args[0]) if whole is None else from_sympy(whole)
    args = [from_sympy(a) for a in value.args]
    if name in ("Pow", "PowByNatural", "FloatPow"):
        if args[1].op == "const" and isinstance(args[1].value, int) and 0 < args[1].value < 8:
            return M.mul(*[args[0]] * args[1].value)
        return M.power(*args)
    if name in ("Max", "Min"):
        return functools.reduce(lambda a, b: M.function(name.lower(), a, b), args)
    if name not in _FUNCTIONS:
        raise Unliftable(NO_FORMULA)
    return _FUNCTIONS[name](*args)


_FUNCTIONS: dict[str, Callable[..., Expr]] = {
    "Add": M.add, "Mul": M.mul, "FloorDiv": M.floordiv, "CleanDiv": M.floordiv, "Mod": M.mod,
    "PythonMod": M.mod, "IntTrueDiv": M.div, "FloatTrueDiv": M.div, "ToFloat": lambda a: a,
    "OpaqueUnaryFn_sqrt": lambda a: M.function("sqrt", a),
}  # fmt: skip
"""What a formula of sympy, or of torch's, is here."""


def _rounded_quotient(name: str, value: Any) -> Expr:
    """A quotient of sizes, rounded down or up (`math.ceil(n / 4)`), in whole numbers."""
    kind = type(value).__name__
    if kind in ("IntTrueDiv", "FloatTrueDiv"):
        above, below = map(_without_floats, value.args)
    elif isinstance(value, sympy.Mul) and value.args[0].is_Float:
        # A number of few binary digits times a size: other products would be rounded before.
        number, divisor = float(value.args[0]).as_integer_ratio()
        rest = _without_floats(value / value.args[0]) if divisor <= _LARGEST_DIVISOR else None
        above, below = None if rest is None else number * rest, sympy.Integer(divisor)
    else:
        above = below = None
    truncates = name == "TruncToInt" and above is not None and above.is_nonnegative
    rounds_down = name == "FloorToInt" or truncates
    if above is None or below is None or not (rounds_down or name == "CeilToInt"):
        raise Unliftable(NO_FORMULA)
    whole, by = from_sympy(above), from_sympy(below)
    return M.floordiv(whole, by) if rounds_down else M.neg(M.floordiv(M.neg(whole), by))


def _without_floats(value: Any) -> Any:
    """A size's formula with floats, rewritten in integers; None where it may be no whole number."""
    name = type(value).__name__
    if value.is_Number:
        return sympy.Integer(int(value)) if float(value).is_integer() else None
    if value.is_Symbol or name == "ToFloat":
        return value.args[0] if value.args else value
    args = [_without_floats(a) for a in value.args]
    if None in args:
        return None
    if name == "FloatTrueDiv":
        return args[0] * args[1] if args[1] in (1, -1) else None
    return value.func(*args) if isinstance(value, (sympy.Add, sympy.Mul)) else None


def to_sympy(node: Expr) -> Any:
    """A size expression as a sympy formula over symbols of the same names."""
    if node.op == "const":
        return sympy.sympify(node.value)
    if node.op == "size":
        return sympy.Integer(node.value) if is_example(node) else sympy.Symbol(node.value, integer=True)
    args = [to_sympy(a) for a in node.args]
    functions: dict[str, Callable[..., Any]] = {
        "add": sympy.Add, "mul": sympy.Mul, "mod": sympy.Mod, "floordiv": lambda a, b: sympy.floor(a / b),
        "min": sympy.Min, "max": sympy.Max,
    }  # fmt: skip
    if node.op not in functions:
        raise Unliftable(NO_FORMULA)
    return functions[node.op](*args)


def evaluate_size(node: Expr, sizes: Mapping[str, int]) -> Any:
    """The number that a size expression stands for.

    Raises:
        Unliftable: the expression is not one over sizes.
    """
    match node.op:
        case "const":
            return node.value
        case "size":
            return int(node.value) if is_example(node) else sizes[node.value]
    functions: dict[str, Callable[..., Any]] = {
        "add": lambda *a: sum(a), "mul": lambda *a: math.prod(a), "floordiv": operator.floordiv,
        "mod": operator.mod, "recip": lambda a: 1 / a, "sqrt": math.sqrt, "pow": operator.pow,
        "min": min, "max": max,
    }  # fmt: skip
    if node.op not in functions:
        raise Unliftable(NO_FORMULA)
    return functions[node.op](*(evaluate_size(a, sizes) for a in node.args))
