"""Formulas of sizes in the text of a graph and in files: `s0 + 1`, `((s1//4))`, `Eq(Mod(s0, 4), 0)`.

They are parsed as arithmetic, never evaluated as Python. In a graph they become nodes, as passes expect: a
size query on an input for each symbol, and a node for each operation; beside a graph they are formulas of
sympy, as torch has them. They are bounded before they are computed, as anybody may have written them: in
letters, and numbers to what 64 bits hold.

The relations between sizes that a graph assumes are such formulas, too, evaluated for concrete sizes.
"""

import ast
import fractions
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy import functions as torchs
from torch.utils._sympy.printers import PythonPrinter

from attngraph.errors import SavedError
from attngraph.ir.graph.call import infer

_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "FloorDiv", ast.Div: "/", ast.Mod: "Mod",
    ast.Pow: "**", ast.BitOr: "Or", ast.BitAnd: "And", ast.USub: "neg", ast.Invert: "Not",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "Eq", ast.NotEq: "Ne",
}  # fmt: skip
_OF_NODES: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "**": operator.pow,
    "neg": operator.neg, "Not": torch.sym_not, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "Max": torch.sym_max, "Min": torch.sym_min, "Mod": operator.mod,
    "PythonMod": operator.mod, "FloorDiv": operator.floordiv, "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv, "Eq": operator.eq, "Ne": operator.ne, "ToFloat": torch.sym_float,
    "TruncToInt": math.trunc, "CeilToInt": math.ceil, "FloorToInt": math.floor, "FloatPow": operator.pow,
    "PowByNatural": operator.pow, "OpaqueUnaryFn_sqrt": torch.sym_sqrt, "And": operator.and_,
    "Or": operator.or_,
}  # fmt: skip
_OF_SYMPY: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "**": operator.pow,
    "neg": operator.neg, "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge,
} | {name: getattr(sympy, name) for name in ("Eq", "Ne", "And", "Or", "Not")} | {
    name: getattr(torchs, name)
    for name in (
        "FloorDiv", "Mod", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "IntTrueDiv", "FloatTrueDiv",
        "FloatPow", "PowByNatural", "ToFloat", "TruncToInt", "TruncToFloat", "RoundToInt", "Max", "Min",
        "OpaqueUnaryFn_sqrt", "Where", "ModularIndexing", "CeilDiv",
    ) if hasattr(torchs, name)
}  # fmt: skip
"""Operations by their signs or names: on numbers and nodes of a graph, and on formulas of sympy."""

MOST_LETTERS, MOST_DEEP = 1 << 14, 200
LARGEST, MOST_POWER = 1 << 63, 64


class Formulas:
    """Reads formulas over the symbols of one graph."""

    def __init__(self, symbols: Mapping[str, torch.SymInt], graph: fx.Graph, mode: Any) -> None:
        self.symbols, self.graph, self.mode = symbols, graph, mode
        self._places: dict[str, tuple[fx.Node, int]] = {}
        self._nodes: dict[str, Any] = {}

    def found(self, node: fx.Node, shape: Sequence[str]) -> None:
        """Record which symbolic sizes an input has."""
        for axis, extent in enumerate(shape):
            if extent in self.symbols:
                self._places.setdefault(extent, (node, axis))

    def take(self, name: str, node: fx.Node, axis: int) -> None:
        """Take a size from this dimension of an input, whatever other inputs have it too."""
        self._places[name] = node, axis

    def value(self, text: str) -> Any:
        """The formula's value: a number or a symbolic size; ValueError where it is not a formula, or it names
        a size that the file's header does not declare."""
        return _read(parsed(text), _OF_NODES, self._symbol, lambda number: number, self._call)

    def node(self, text: str) -> Any:
        """A number, or the node of the graph that computes the formula; ValueError as in `value`, and where
        no input has one of the named sizes."""
        if text not in self._nodes:
            self._nodes[text] = _read(parsed(text), _OF_NODES, self._query, lambda number: number, self._call)
        return self._nodes[text]

    def _symbol(self, name: str) -> torch.SymInt:
        if name not in self.symbols:
            raise ValueError(
                f"{name} is neither a value nor a size; the line `sizes` names "
                f"{', '.join(self.symbols) or 'none'}"
            )
        return self.symbols[name]

    def _query(self, name: str) -> fx.Node:
        self._symbol(name)
        if name not in self._places:
            raise ValueError(f"no input has the size {name}")
        if name not in self._nodes:
            self._nodes[name] = self._call(torch.ops.aten.sym_size.int, *self._places[name])
        found: fx.Node = self._nodes[name]
        return found

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """A number, or a node; of more than two arguments of two after the other."""
        if len(args) > 2:
            return functools.reduce(functools.partial(self._call, function), args)
        if not any(isinstance(a, fx.Node) for a in args):
            return function(*args)
        node = self.graph.call_function(function, args)
        node.meta["val"] = infer(function, args, {}, self.mode)
        return node


def _read(
    tree: ast.expr, functions: Mapping[str, Callable[..., Any]], name: Callable[[str], Any],
    number: Callable[[Any], Any], call: Callable[..., Any],
) -> Any:  # fmt: skip
    """What a formula is, put together from what its names, numbers and operations are."""

    def read(tree: ast.expr) -> Any:
        sign, parts = "", list[ast.expr]()
        match tree:
            case ast.Constant(value=int() | float() as known) if abs(known) <= LARGEST:
                return number(known)
            case ast.Name(id=known):
                return name(known)
            case ast.UnaryOp(op=op, operand=operand):
                sign, parts = _SIGNS.get(type(op), ""), [operand]
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
                sign, parts = _SIGNS.get(type(op), ""), [left, right]
            case ast.Call(func=ast.Name(id=sign), args=[_, *_] as parts, keywords=[]):
                pass
        if sign not in functions:
            raise ValueError(f"{ast.unparse(tree)!r} is no formula of sizes")
        args = [read(part) for part in parts]
        if sign == "**" or "Pow" in sign:
            _check_power(*args)
        return call(functions[sign], *args)

    return read(tree)


def _check_power(base: Any, exponent: Any = 1) -> None:
    """Raise ValueError unless a power is small enough to be computed."""
    base, exponent = (float(n) if getattr(n, "is_number", False) else n for n in (base, exponent))
    whole = [n for n in (base, exponent) if isinstance(n, (int, float)) and not isinstance(n, bool)]
    if isinstance(exponent, (int, float)) and abs(exponent) > MOST_POWER:
        raise ValueError(f"the power {exponent} is larger than {MOST_POWER}")
    if len(whole) == 2 and abs(base) > 1 and exponent * math.log2(abs(base)) > MOST_POWER:
        raise ValueError(f"{base} to the power {exponent} is more than 64 bits hold")


def parsed(text: str) -> ast.expr:
    """The tree of a formula; ValueError where it is none, or is longer or deeper than the formulas of any
    model."""
    deep = max(itertools.accumulate((letter in "([") - (letter in ")]") for letter in text), default=0)
    if len(text) > MOST_LETTERS or deep > MOST_DEEP:
        raise ValueError(f"a formula of {len(text)} letters, {deep} deep, is too long")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if _powers(tree) > 2:
            raise ValueError(f"{text[:80]!r} has powers of powers of powers")
        return tree
    except (SyntaxError, MemoryError, RecursionError) as problem:
        raise ValueError(f"{text[:80]!r} is no value") from problem


def _powers(tree: ast.AST) -> int:
    """How many powers are inside of each other."""
    by_name = isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and "Pow" in tree.func.id
    own = by_name or (isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Pow))
    return own + max(map(_powers, ast.iter_child_nodes(tree)), default=0)


def size_text(formula: Any, names: Mapping[str, str]) -> int | float | bool | str:
    """A formula of sizes, or a relation of them, as it is written in a file. `names`: of sizes in the file by
    those in the formula. SavedError where it cannot be read back."""
    if isinstance(formula, (bool, int, float)):
        return formula
    if isinstance(formula, (torch.SymInt, torch.SymBool, torch.SymFloat)):
        formula = formula.node.expr
    symbols = {s: sympy.Symbol(names.get(str(s), str(s)), integer=True) for s in formula.free_symbols}
    text = str(formula.xreplace(symbols))
    try:
        same = str(size_of(text, {})) == text
    except (ValueError, TypeError, SyntaxError):
        same = False
    if not same:
        raise SavedError(f"the size {text} has no form in a file")
    return text


def size_of(text: int | float | bool | str, names: Mapping[str, str]) -> Any:
    """The number, or the formula over symbols, that `size_text` wrote. `names`: of sizes in the formula by
    those in the file. ValueError where it is no formula."""
    if not isinstance(text, str):
        return text
    symbol = functools.partial(sympy.Symbol, integer=True)
    return _read(parsed(text), _OF_SYMPY, lambda name: symbol(names.get(name, name)), _number, operator.call)


def _number(known: bool | int | float) -> Any:
    if isinstance(known, bool):
        return sympy.true if known else sympy.false
    return sympy.Integer(known) if isinstance(known, int) else sympy.Float(known)


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
    if any(not hasattr(PythonPrinter, f"_print_{type(f).__name__}") for f in condition.atoms(sympy.Function)):
        # Torch prints unsupported functions as plain Python calls.
        return names, lambda *sizes: condition.subs(dict(zip(symbols, sizes, strict=True))) is not sympy.false
    printer = _PlacesForNames({symbol: f"_{place}" for place, symbol in enumerate(symbols)})
    code = f"lambda {', '.join(printer.places.values())}: {printer.doprint(condition)}"
    return names, eval(code, {"math": math, "torch": torch, "Fraction": fractions.Fraction})


def python_text(condition: Any) -> str:
    """A relation as a Python expression of its symbols."""
    return PythonPrinter().doprint(condition)  # type: ignore[no-any-return]


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
