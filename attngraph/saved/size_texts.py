"""Formulas of sizes as JSON values and back. Nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as torchs

from attngraph.errors import SavedError
from attngraph.ir.graph.formula import LARGEST, check_power, parsed

_FUNCTIONS: dict[str, Any] = {
    name: getattr(torchs, name)
    for name in (
        "FloorDiv", "Mod", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "IntTrueDiv", "FloatTrueDiv",
        "FloatPow", "PowByNatural", "ToFloat", "TruncToInt", "TruncToFloat", "RoundToInt", "Max", "Min",
        "OpaqueUnaryFn_sqrt", "Where", "ModularIndexing", "CeilDiv",
    ) if hasattr(torchs, name)
} | {name: getattr(sympy, name) for name in ("Eq", "Ne", "And", "Or", "Not")}  # fmt: skip
_BINARY: dict[type[ast.operator], Any] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b, ast.Pow: lambda a, b: a**b, ast.FloorDiv: torchs.FloorDiv,
    ast.Mod: torchs.Mod, ast.BitAnd: sympy.And, ast.BitOr: sympy.Or,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], Any] = {
    ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
    ast.Eq: sympy.Eq, ast.NotEq: sympy.Ne,
}  # fmt: skip


def size_text(formula: Any, names: Mapping[str, str]) -> int | float | bool | str:
    """A formula of sizes, or a relation of them, as it is written in a file. `names`: of sizes in the file by
    those in the formula.

    Raises:
        SavedError: it cannot be read back.
    """
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
    those in the file.

    Raises:
        ValueError: it is no formula.
    """
    if not isinstance(text, str):
        return text
    return _formula(parsed(text), names)


def _formula(tree: ast.expr, names: Mapping[str, str]) -> Any:
    def formula(tree: ast.expr) -> Any:
        return _formula(tree, names)

    match tree:
        case ast.Constant(value=bool() as truth):
            return sympy.true if truth else sympy.false
        case ast.Constant(value=int() as number) if abs(number) <= LARGEST:
            return sympy.Integer(number)
        case ast.Constant(value=float() as number):
            return sympy.Float(number)
        case ast.Name(id=name):
            return sympy.Symbol(names.get(name, name), integer=True)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -formula(operand)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return sympy.Not(formula(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = formula(left), formula(right)
            if isinstance(op, ast.Pow):
                check_power(*(float(n) if n.is_number else n for n in (first, second)))
            return _BINARY[type(op)](first, second)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            return _COMPARED[type(op)](formula(left), formula(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            given = list(map(formula, args))
            if "Pow" in name and len(given) == 2:
                check_power(*(float(n) if n.is_number else n for n in given))
            return _FUNCTIONS[name](*given)
    raise ValueError(f"{ast.unparse(tree)!r} is no formula of sizes")
