"""Step programs: what a step of a decoder runs again and again, as operations on tensors. One step of a loop
over tokens has two parts:

    begin:
        v0 = aten.zeros_like.default(t0)
        v1 = aten.maximum.default(v0, t0)
        return v1, v1
    step:
        v0 = aten.maximum.default(c0, t0)
        return v0, v0

`begin` is what a row's first token computes, `step` what every later one does. `t0, t1, ...` are values of
the token, `s0, ...` tensors that all tokens share, `c0, ...` what the step before handed on; `rows` is how
many rows take the step. Tensors of tokens and those handed on have a row in each place of their first
dimension. The first result is the value of the token, the others are handed on.

What is run for one row at a time (`ir/ops/each_row.py`) has one part, `row:`, with other names.

Each part is compiled to an `fx.GraphModule`. Nothing but operators of a closed list (`ir/operations.py`),
their plain arguments and arithmetic of `rows` can be written, and nothing is evaluated as Python.
"""

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from attngraph.ir.exactly import in_float64
from attngraph.ir.in_order import IN_ORDER
from attngraph.ir.operations import is_pure, packet_of

_ARITHMETIC: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_WORDS = {"inf": float("inf"), "nan": float("nan")}
_KINDS = (torch.dtype, torch.layout, torch.memory_format)


class Step(NamedTuple):
    """Both parts, as graphs of (rows, tokens, shared, carried) that give a list of tensors."""

    begin: fx.GraphModule
    step: fx.GraphModule


@functools.lru_cache(maxsize=256)
def parse(text: str, wide: bool = False) -> Step:
    """A program from its text. `wide`: floating dtypes that are written stand for float64, and of equal
    numbers the first are chosen. ValueError where a
    line is malformed."""
    parts = _parts(text, ["begin", "step"])
    return Step(*(_Part(lines, wide, _OF_STEPS).function() for lines in parts))


@functools.lru_cache(maxsize=256)
def parse_row(text: str, wide: bool = False) -> fx.GraphModule:
    """A program of the part `row` as a graph of (tokens, new, first, t, h, s, p, k) that gives a list of one
    tensor; `wide` and errors as in `parse`."""
    return _Part(_parts(text, ["row"])[0], wide, _OF_ROWS).function()


_OF_STEPS = ("rows", "t", "s", "c")
_OF_ROWS = ("tokens", "new", "first", "t", "h", "s", "p", "k")
"""What parts are given: numbers by words, lists of tensors by letters."""


def _parts(text: str, wanted: list[str]) -> list[list[str]]:
    parts: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(" "):
            lines = parts[line.rstrip(":")] = []
        elif line.strip():
            lines.append(line.strip())
    if list(parts) != wanted:
        raise ValueError(f"a step program has the parts {' and '.join(wanted)}, not {', '.join(parts)}")
    return list(parts.values())


class _Part:
    """One part under construction."""

    def __init__(self, lines: list[str], wide: bool, given: Sequence[str]) -> None:
        self.graph, self.wide = fx.Graph(), wide
        self.given = {name: self.graph.placeholder(name) for name in given}
        self.names: dict[str, Any] = {name: node for name, node in self.given.items() if len(name) > 1}
        for line in lines:
            self._line(line)

    def function(self) -> fx.GraphModule:
        if next(iter(reversed(self.graph.nodes))).op != "output":
            raise ValueError("a part of a step program ends with its results")
        self.graph.eliminate_dead_code()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _line(self, line: str) -> None:
        try:
            (statement,) = ast.parse(re.sub(r"\Areturn ", "results = ", line)).body
        except SyntaxError as problem:
            raise ValueError(f"{line!r} is no operation") from problem
        match statement:
            case ast.Assign(targets=[ast.Name(id="results")], value=value):
                found = self._value(value)
                self.graph.output(list(found) if isinstance(found, (list, tuple)) else [found])
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = self._value(value)
            case _:
                raise ValueError(f"{line!r} is no operation")

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._named(name)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._value(part) for part in parts]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self.graph.call_function(
                    _ARITHMETIC[type(op)], (self._value(left), self._value(right))
                )
            case ast.Subscript(value=value, slice=ast.Constant(value=int(place))):
                return self.graph.call_function(operator.getitem, (self._value(value), place))
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                value = getattr(torch, name, None)
                if not isinstance(value, _KINDS):
                    raise ValueError(f"{value} cannot stand in a step program")
                wider = self.wide and isinstance(value, torch.dtype) and value.is_floating_point
                return torch.float64 if wider else value
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=args):
                function = torch.sym_min if name == "min" else torch.sym_max
                return self.graph.call_function(function, tuple(map(self._value, args)))
            case ast.Call(func=ast.Name(id="at"), args=[ast.Name(id=name), places]) if name[:1] == "k":
                return self.graph.call_function(_at, (self._named(name), self._value(places)))
            case ast.Call(func=function, args=args, keywords=named):
                given = {str(k.arg): self._value(k.value) for k in named}
                called = _operator(function)
                called = IN_ORDER.get(called) or in_float64(called) if self.wide else called
                return self.graph.call_function(called, tuple(map(self._value, args)), given)
        raise ValueError(f"{ast.unparse(node)!r} cannot stand in a step program")

    def _named(self, name: str) -> Any:
        if name not in self.names:
            kind, number = name[:1], name[1:]
            if name in _WORDS:
                return _WORDS[name]
            if kind not in self.given or not number.isdigit():
                raise ValueError(f"{name} is not defined above")
            self.names[name] = self.graph.call_function(operator.getitem, (self.given[kind], int(number)))
        return self.names[name]


def _at(stored: Callable[[Any], Any], places: Any) -> Any:
    """What stands at some places of a value that a row reads (`ir/ops/each_row.py`)."""
    return stored(places)


def _operator(function: ast.expr) -> Any:
    """The operator `library.name.overload`."""
    name = ast.unparse(function)
    packet, more = packet_of(name, runs=True)
    found = getattr(packet, more[0]) if more and more[0] in packet.overloads() else None
    if found is None or not is_pure(found):
        raise ValueError(f"{name} is no operator that a step program may have")
    return found


def written(value: Any, names: Mapping[Any, str]) -> str:
    """An argument of an operation as text; ValueError where it has none."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(written(v, names) for v in value)}]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, _KINDS):
        return str(value)
    raise ValueError(f"{value!r} has no form in a step program")
