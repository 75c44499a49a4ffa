"""How a program graph prints: the dump format.

One line per value, numbered in order, with its type and the user's line; score programs are written
out under their attention. Two prints of the same computation are the same text: no addresses, no
machine paths, no names that torch made up.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ProgramGraph, is_size, op_name
from attngraph.ir.source import source_of

_DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_COLUMN = 78


def format_graph(graph: ProgramGraph) -> str:
    """The whole graph as text; before it, what is computed from weights alone and what once for a prompt."""
    parts = (("ahead", graph.ahead), ("prelude", graph.prelude), ("graph", graph))
    lines = [line for name, part in parts if part is not None for line in _Printer(part, name).lines()]
    return "\n".join(_with_plain_sizes(lines))


def _with_plain_sizes(lines: list[str]) -> list[str]:
    """Symbolic sizes renamed s0, s1, ... in order of appearance: torch's own numbers differ from one
    trace to the next."""
    names: dict[str, str] = {}

    def rename(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"s{len(names)}")

    renamed = []
    for line in lines:
        code, mark, comment = line.partition("  # ")
        renamed.append(re.sub(r"\bs\d+\b", rename, code) + mark + comment)
    return renamed


def format_type(value: Any) -> str:
    """`f32[2, T, 64]` for a tensor, `size` for a number."""
    if isinstance(value, Tensor):
        return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(format_type(v) for v in value)})"
    return "size"


class _Printer:
    def __init__(self, graph: ProgramGraph, title: str) -> None:
        self.graph, self.title = graph, title
        self.names: dict[fx.Node, str] = {}
        self.count = 0

    def lines(self) -> list[str]:
        head = [f"{self.title}("]
        for node, given in zip(self.graph.placeholders(), self.graph.inputs, strict=True):
            self.names[node] = f"%arg{given.name}" if given.kind == "argument" else f"${given.label}"
            if node.users or given.kind == "argument":
                head.append(f"  {self.names[node]}: {format_type(node.meta.get('val'))},")
        body: list[str] = []
        for node in self.graph.graph.nodes:
            if node.op == "call_function":
                body += self._call(node)
            elif node.op == "output":
                body.append(f"  return {self._argument(node.args[0])}")
        return [*head, ") {", *body, "}"]

    def _call(self, node: fx.Node) -> list[str]:
        if is_size(node):
            self.names[node] = str(node.meta["val"])  # sizes print as the formula that they are
            return []
        if node.target is torch.ops.attngraph.attention.default:
            return self._attention(node)
        if node.target is torch.ops.attngraph.cached_attention.default:
            return self._cached_attention(node)
        if node.target is torch.ops.attngraph.latent_attention.default:
            q, latent, key_up, value_up, values, *rest = node.args
            return self._latent(node, "latent_attention", (q, latent), (key_up, value_up, values), rest)
        if node.target is torch.ops.attngraph.cached_latent_attention.default:
            q, latent, pages, key_up, value_up, values, *rest = node.args
            ups = (key_up, value_up, values)
            return self._latent(node, "cached_latent_attention", (q, latent, pages), ups, rest)
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
            whole = self.names[node.args[0]]
            self.names[node] = (
                whole if self._is_attention(node.args[0]) and node.args[1] == 0 else f"{whole}.{node.args[1]}"
            )
            return []
        args = [self._argument(a) for a in node.args]
        args += [f"{k}={self._argument(v)}" for k, v in node.kwargs.items() if v is not None]
        return [self._line(node, f"{op_name(node)}({', '.join(args)})", node.meta.get("val"))]

    @staticmethod
    def _is_attention(node: fx.Node) -> bool:
        return node.target is torch.ops.attngraph.attention.default

    def _attention(self, node: fx.Node) -> list[str]:
        q, k, v, reads, sizes, program, *kernel = node.args
        args = [self._argument(a) for a in (q, k, v)]
        args += [f"r{i}={self._argument(r)}" for i, r in enumerate(reads)]  # type: ignore[arg-type, union-attr]
        args += [f"n{i}={self._argument(s)}" for i, s in enumerate(sizes)]  # type: ignore[arg-type, union-attr]
        if kernel and kernel[0]:
            args.append(f"kernel={kernel[0]}")
        lines = [self._line(node, f"attention({', '.join(args)})", node.meta["val"][0])]
        return lines + [f"          {line}" for line in str(program).splitlines()]

    def _cached_attention(self, node: fx.Node) -> list[str]:
        q, k, v, k_pages, v_pages, reads, sizes, program, table, _, _, held, *by = node.args
        args = [self._argument(a) for a in (q, k, v, k_pages, v_pages)]
        args += [f"r{i}={self._argument(r)}" for i, r in enumerate(reads)]  # type: ignore[arg-type, union-attr]
        args += [f"n{i}={self._argument(s)}" for i, s in enumerate(sizes)]  # type: ignore[arg-type, union-attr]
        args += [f"table={self._argument(table)}", f"held={self._argument(held)}"]
        if by and by[0]:
            args.append(f"by={by[0]}")
        lines = [self._line(node, f"cached_attention({', '.join(args)})", node.meta["val"])]
        return lines + [f"          {line}" for line in str(program).splitlines()]

    def _latent(self, node: fx.Node, name: str, operands: Any, ups: Any, rest: Any) -> list[str]:
        reads, sizes, program, *more = rest
        *rows, absorb, family = more
        key_up, value_up, (first, count) = ups
        args = [self._argument(a) for a in operands]
        args += [
            f"{n}={self._argument(w)}"
            for n, w in (("key_up", key_up), ("value_up", value_up))
            if w is not None
        ]
        args.append(f"values={first}:{first + count}")
        args += [f"r{i}={self._argument(r)}" for i, r in enumerate(reads)]
        args += [f"n{i}={self._argument(s)}" for i, s in enumerate(sizes)]
        if rows:
            args += [f"table={self._argument(rows[0])}", f"held={self._argument(rows[3])}"]
        args.append(f"absorb={absorb}")
        if family:
            args.append(f"family={family}")
        lines = [self._line(node, f"{name}({', '.join(args)})", node.meta["val"])]
        return lines + [f"          {line}" for line in str(program).splitlines()]

    def _line(self, node: fx.Node, call: str, value: Any) -> str:
        self.names[node] = f"%{self.count}"
        self.count += 1
        text = f"  {self.names[node]} = {call} : {format_type(value)}"
        notes = [n for n in (source_of(node), node.meta.get("tokens", "")) if n]
        return f"{text.ljust(_COLUMN)}  # {'; '.join(notes)}" if notes else text

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(v) for v in value)}]"
        if isinstance(value, torch.dtype):
            return _DTYPES.get(value, str(value))
        return str(value)
