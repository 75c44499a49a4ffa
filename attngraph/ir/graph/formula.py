"""Formulas of sizes in the text of a graph: `s0 + 1`, `((s1//4))`, `Max(1, s0)`, `Eq(Mod(s0, 4), 0)`.

They are parsed as arithmetic, never evaluated as Python, and become nodes of the graph, as passes expect: a
size query on an input for each symbol, and a node for each operation. They are bounded before they are
computed, as anybody may have written them: in letters, and numbers to what 64 bits hold.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.infer import infer

_BINARY: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {
    "Max": torch.sym_max, "Min": torch.sym_min, "Mod": operator.mod, "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv, "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv,
    "Eq": operator.eq, "Ne": operator.ne, "ToFloat": torch.sym_float, "TruncToInt": math.trunc,
    "CeilToInt": math.ceil, "FloorToInt": math.floor, "FloatPow": operator.pow, "PowByNatural": operator.pow,
    "OpaqueUnaryFn_sqrt": torch.sym_sqrt, "And": operator.and_, "Or": operator.or_,
}  # fmt: skip


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
        """The formula's value: a number or a symbolic size.

        Raises:
            ValueError: it is not a formula, or it names a size that the file's header does not declare.
        """
        return self._walk(parsed(text), self._symbol, lambda function, *args: function(*args))

    def node(self, text: str) -> Any:
        """A number, or the node of the graph that computes the formula.

        Raises:
            ValueError: as `value`, or no input has one of the named sizes.
        """
        if text not in self._nodes:
            self._nodes[text] = self._walk(parsed(text), self._query, self._call)
        return self._nodes[text]

    def _walk(self, tree: ast.expr, name: Callable[[str], Any], call: Callable[..., Any]) -> Any:
        def walk(tree: ast.expr) -> Any:
            match tree:
                case ast.Constant(value=int() | float() as number) if abs(number) <= LARGEST:
                    return number
                case ast.Name(id=known):
                    return name(known)
                case ast.UnaryOp(op=ast.USub(), operand=operand):
                    return call(operator.neg, walk(operand))
                case ast.UnaryOp(op=ast.Invert(), operand=operand):
                    return call(torch.sym_not, walk(operand))
                case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                    first, second = walk(left), walk(right)
                    if isinstance(op, ast.Pow):
                        check_power(first, second)
                    return call(_BINARY[type(op)], first, second)
                case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                    return call(_COMPARE[type(op)], walk(left), walk(right))
                case ast.Call(func=ast.Name(id=function), args=[first, *more], keywords=[]) if (
                    function in _CALLS
                ):
                    found = walk(first)
                    for other in more:
                        second = walk(other)
                        if _CALLS[function] is operator.pow:
                            check_power(found, second)
                        found = call(_CALLS[function], found, second)
                    return found if more else call(_CALLS[function], found)
            raise ValueError(f"{ast.unparse(tree)!r} is no formula of sizes")

        return walk(tree)

    def _symbol(self, name: str) -> torch.SymInt:
        if name not in self.symbols:
            raise ValueError(
                f"{name} is neither a value nor a size; the line `sizes` names {_all(self.symbols)}"
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
        if not any(isinstance(a, fx.Node) for a in args):
            return function(*args)
        node = self.graph.call_function(function, args)
        node.meta["val"] = infer(function, args, {}, self.mode)
        return node


def check_power(base: Any, exponent: Any) -> None:
    """Raise ValueError unless a power is small enough to be computed."""
    whole = [n for n in (base, exponent) if isinstance(n, (int, float)) and not isinstance(n, bool)]
    if isinstance(exponent, (int, float)) and abs(exponent) > MOST_POWER:
        raise ValueError(f"the power {exponent} is larger than {MOST_POWER}")
    if len(whole) == 2 and abs(base) > 1 and exponent * math.log2(abs(base)) > MOST_POWER:
        raise ValueError(f"{base} to the power {exponent} is more than 64 bits hold")


def parsed(text: str) -> ast.expr:
    """The tree of a formula.

    Raises:
        ValueError: it is none, or is longer or deeper than the formulas of any model.
    """
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


def _all(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"
