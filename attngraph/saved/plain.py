"""Plain records as JSON values and back, by the types that their classes declare. Nothing is executed, and no
class is made that the caller has not named."""

from __future__ import annotations

import ast
import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as torchs

from attngraph.errors import SavedError


def plain(value: Any) -> Any:
    """A record, a tuple, a dtype or a plain value as a JSON value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise SavedError(f"a {type(value).__name__} has no form in a file")


def made(kind: Any, data: Any) -> Any:
    """The value of this type that `plain` wrote.

    Raises:
        ValueError, TypeError, KeyError: it is another one.
    """
    if dataclasses.is_dataclass(kind):
        fields = _types_of(typing.cast(Any, kind))
        return kind(**{name: made(fields[name], value) for name, value in data.items()})  # type: ignore[operator]
    kinds = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        every = kinds[:1] * len(data) if kinds[-1] is Ellipsis else kinds
        return tuple(made(k, value) for k, value in zip(every, data, strict=True))
    if type(None) in kinds:
        return None if data is None else made(kinds[0], data)
    if kind is torch.dtype:
        return dtype_of(data)
    if kind in (bool, int, float, str) and not isinstance(data, (bool, int, float, str)):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    return data


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    """The types of a record's fields, by name."""
    return typing.get_type_hints(kind)


def dtype_of(text: str) -> torch.dtype:
    """The dtype of a name such as "torch.float32"."""
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r} is no dtype")
    return found


# --- formulas of sizes ---

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
    return _formula(ast.parse(text, mode="eval").body, names)


def _formula(tree: ast.expr, names: Mapping[str, str]) -> Any:
    def formula(tree: ast.expr) -> Any:
        return _formula(tree, names)

    match tree:
        case ast.Constant(value=bool() as truth):
            return sympy.true if truth else sympy.false
        case ast.Constant(value=int() as number):
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
            return _BINARY[type(op)](formula(left), formula(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            return _COMPARED[type(op)](formula(left), formula(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(formula, args))
    raise ValueError(f"{ast.unparse(tree)!r} is no formula of sizes")
