"""How a program graph prints: the dump format, which `ir/graph/reader.py` reads back.

One line per value, numbered in order, with its type and the user's line; a line `[h.0.attn]` before the
values of a module of the user's; score programs are written out under their attention. Two prints of the
same computation are the same text: no addresses, no machine paths, no names that torch made up.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from attngraph.ir.graph.literals import format_dtype, format_name
from attngraph.ir.graph.overloads import implied
from attngraph.ir.graph.program_graph import Input, Output, ProgramGraph, Rate, is_size, op_name
from attngraph.ir.graph.source import module_of, source_of
from attngraph.ir.ops.nodes import AttentionOp, view

VERSION = 1
_COLUMN = 78
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NAMED = ("key_up", "value_up", "table", "held")
"""Tensors that an attention prints with their names."""
_SAME = ("starts", "first")
"""Tensors that are the same for all attentions of a step: not printed."""


def format_file(graph: ProgramGraph) -> tuple[str, str]:
    """What a file says of a graph first (the version of the format, the level, the sizes of the example with
    what is known of them), and the graph."""
    names: dict[str, str] = {}
    parts = (*((rate.value, graph.stages[rate]) for rate in Rate if rate in graph.stages), ("graph", graph))
    lines = [line for name, part in parts for line in _Printer(part, name, names).lines()]
    plain = _Sizes(names)
    flags = ", gradients" if graph.gradients else ""
    head = [f"dump {VERSION}, level {graph.level.name.lower()}{flags}"]
    sizes = [f"{plain(sympy.Symbol(name))} = {hint}" for name, hint in graph.hints.items()]
    if sizes:
        head.append(f"sizes {', '.join(sorted(sizes, key=_by_number))}")
    known = [c for c in graph.conditions if {str(s) for s in c.free_symbols} <= graph.hints.keys()]
    head += dict.fromkeys(f"where {plain(c)}" for c in known)
    return "\n".join(head), "\n".join(lines)


def input_name(given: Input) -> str:
    """How an input is called in the text: `%arg0`, `$h.0.weight`."""
    return f"%arg{given.name}" if given.kind == "argument" else format_name("$", given.label)


def _by_number(text: str) -> tuple[int, str]:
    return len(text.split(" ")[0]), text


class _Sizes:
    """Symbolic sizes renamed s0, s1, ... in order of appearance: torch's own numbers differ from one trace to
    the next, and with them the order of factors and terms."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def __call__(self, value: Any) -> str:
        formula = value.node.expr if isinstance(value, _SYMBOLIC) else value
        if not isinstance(formula, sympy.Basic):
            return str(value)
        for name in _appearing(formula):
            self.names.setdefault(name, f"s{len(self.names)}")
        symbols = formula.free_symbols
        return _renamed(formula, frozenset((s, self.names[str(s)]) for s in symbols if str(s) in self.names))


@functools.lru_cache(maxsize=1 << 14)
def _appearing(formula: Any) -> tuple[str, ...]:
    """The names of sizes in a formula, in the order in which it prints."""
    return tuple(re.findall(r"\bs\d+\b", str(_sizes_first(formula))))


@functools.lru_cache(maxsize=1 << 14)
def _renamed(formula: Any, names: frozenset[tuple[Any, str]]) -> str:
    return str(_sizes_first(formula).xreplace({symbol: sympy.Symbol(name) for symbol, name in names}))


def _sizes_first(formula: Any) -> Any:
    is_relation = isinstance(formula, sympy.core.relational.Relational)
    return formula.reversed if is_relation and formula.lhs.is_number else formula


class _Printer:
    def __init__(self, graph: ProgramGraph, title: str, names: dict[str, str]) -> None:
        self.graph, self.title = graph, title
        self.size = _Sizes(names)
        self.names: dict[fx.Node, str] = {}
        self.count = 0
        self.module = ""

    def lines(self) -> list[str]:
        head = [f"{self.title}("]
        for node, given in zip(self.graph.placeholders(), self.graph.inputs, strict=True):
            self.names[node] = input_name(given)
            if node.users or given.kind == "argument":
                kind = "" if given.kind in ("argument", "parameter") else f"{given.kind} "
                head.append(f"  {kind}{self.names[node]}: {self._type(node.meta.get('val'), True)},")
        body: list[str] = []
        for node in self.graph.graph.nodes:
            if node.op == "call_function":
                body += self._call(node)
            elif node.op == "output":
                results = [
                    self._result(value, to)
                    for value, to in zip(node.args[0], self.graph.outputs, strict=True)  # type: ignore[arg-type]
                ]
                body.append(f"  return [{', '.join(results)}]")
        return [*head, ") {", *body, "}"]

    def _result(self, value: Any, to: Output) -> str:
        kind = "" if to.kind == "value" else f"{to.kind} "
        where = f"{kind}{format_name('$', to.name.removeprefix('model.'))} = " if to.name else ""
        inverted = f" order {list(to.order)}" if list(to.order) != sorted(to.order) else ""
        return f"{where}{self._argument(value)}{inverted}"

    def _call(self, node: fx.Node) -> list[str]:
        if is_size(node):
            self.names[node] = self.size(node.meta["val"])  # sizes print as the formula that they are
            return []
        attention = view(node)
        if attention is not None:
            return self._attention(node, attention)
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
            place, whole = node.args[1], self.names[node.args[0]]
            is_first = view(node.args[0]) is not None and place == 0
            self.names[node] = whole if is_first else f"{whole}.{place}"
            return []
        args = [self._argument(a) for a in node.args]
        args += [f"{k}={self._argument(v)}" for k, v in node.kwargs.items() if v is not None]
        return self._line(node, f"{_op(node)}({', '.join(args)})", node.meta.get("val"))

    def _attention(self, node: fx.Node, attention: AttentionOp) -> list[str]:
        """Its arguments, by name but for the tensors that it begins with; under it its program."""
        args: list[str] = []
        for name, value in attention.named.items():
            if name in ("reads", "sizes"):
                letter = "r" if name == "reads" else "n"
                args += [f"{letter}{i}={self._argument(v)}" for i, v in enumerate(value)]
            elif name == "values":
                args.append(f"values={value[0]}:{sum(value)}")
            elif isinstance(value, fx.Node) and name not in _SAME:
                args.append(f"{f'{name}=' if name in _NAMED else ''}{self._argument(value)}")
            elif isinstance(value, str) and value:
                args.append(f"{name}={value}")
        value = node.meta["val"]
        result = value[0] if isinstance(value, tuple) else value  # beside the log-sum-exp
        lines = self._line(node, f"{op_name(node)}({', '.join(args)})", result)
        return lines + [f"          {line}" for line in str(attention.program).splitlines()]

    def _line(self, node: fx.Node, call: str, value: Any) -> list[str]:
        self.names[node] = f"%{self.count}"
        self.count += 1
        text = f"  {self.names[node]} = {call} : {self._type(value)}"
        notes = [n for n in (source_of(node), node.meta.get("tokens", "")) if n]
        line = f"{text.ljust(_COLUMN)}  # {'; '.join(notes)}" if notes else text
        module = module_of(node)
        if module == self.module:
            return [line]
        self.module = module
        return [f"  [{format_name('', module) if module else ''}]", line]

    def _type(self, value: Any, is_input: bool = False) -> str:
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self._type(v) for v in value)})"
        if not isinstance(value, Tensor):
            return "size"
        text = f"{format_dtype(value.dtype)}[{', '.join(self.size(s) for s in value.shape)}]"
        if is_input and not value.is_contiguous():
            text += f" strides [{', '.join(self.size(s) for s in value.stride())}]"
        return text if value.device.type == "cpu" else f"{text} on {value.device}"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(v) for v in value)}]"
        if isinstance(value, torch.dtype):
            return format_dtype(value)
        return repr(value) if isinstance(value, str) else self.size(value)


def _op(node: fx.Node) -> str:
    """`add` for ATen's, `library.op` for others; with the overload where the arguments do not imply it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return op_name(node)
    name = op_name(node) if target.namespace == "aten" else f"{target.namespace}.{op_name(node)}"
    known = implied(target.overloadpacket, node.args, node.kwargs)
    return name if known is target else f"{name}.{target._overloadname}"
