"""Terms of the C that is written: source with its kind, literals, conversions, and what is known of an
expression before it is written."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct

import torch

from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr
from attngraph.meaning.masks import tiles

SMALL = 1 << 28
"""Indices, extents and values of expressions of sizes stay below this (checked at every call), so that
sums and differences of them fit 32 bits."""
READS = {
    torch.bool: ("uint8_t", "bool", "bool"), torch.int32: ("int32_t", "int32", "int"),
    torch.int64: ("int64_t", "int64", "long"), torch.float32: ("float", "float", "float"),
    torch.bfloat16: ("uint16_t", "bfloat16", "float"), torch.float16: ("_Float16", "float16", "float"),
}  # fmt: skip
"""Tensors that a program may read: how C holds an element, how it is converted, and to which kind.
Narrow integers are missing because PyTorch wraps them around where C computes in wider ones."""

TYPES = {"bool": "int", "int": "int", "long": "int64_t", "float": "float"}
"""C's types of the kinds."""


@dataclasses.dataclass(frozen=True)
class Term:
    """Source of an expression that binds as tightly as a name does, and its kind: "bool", "int" (32
    bits), "long" or "float"."""

    code: str
    kind: str


def number(value: float) -> str:
    """A float32 literal of the number nearest to `value`."""
    if math.isnan(value):
        return "NAN"
    try:
        single = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        single = math.copysign(math.inf, value)
    if math.isinf(single):
        return "INFINITY" if single > 0 else "(-INFINITY)"
    return f"({single!r}f)" if math.copysign(1.0, single) < 0 else f"{single!r}f"


def is_number(node: Expr) -> bool:
    """Whether the value is one number for the whole call: made of constants and sizes only."""
    return all(n.op not in ("var", "read", "dot", "s", "p", "random") for n in E.walk(node))


_KEEP_WHOLE = frozenset({
    "add", "sub", "mul", "floordiv", "mod", "min", "max", "neg", "abs", "sign", "floor", "ceil", "trunc",
    "round",
})  # fmt: skip


def kind_of_number(node: Expr) -> str:
    """The kind that `ir/language/evaluate.py` gives a number made of constants and sizes."""
    if node.op == "size" or node.op == "int":
        return "int"
    if node.op == "const" or node.op in E.BOOLEAN:
        return node.kind
    kinds = {kind_of_number(arg) for arg in (node.args[1:] if node.op == "where" else node.args)}
    if node.op == "where" and kinds == {"bool"}:
        return "bool"
    return "int" if node.op in (*_KEEP_WHOLE, "where") and "float" not in kinds else "float"


@functools.lru_cache(maxsize=4096)
def bounds(node: Expr) -> tiles.Interval:
    """Bounds of an integer expression whose indices, and expressions of sizes, are `SMALL`."""
    place = S.index("q")
    small = E.make("sub", (place, place), None, "int")

    def leaf(n: Expr) -> Expr:
        if n.op != "const" and is_number(n):
            return small if n.kind != "bool" else E.make("eq", (place, place), None, "bool")
        return E.make(n.op, tuple(leaf(a) for a in n.args), n.value, n.kind) if n.args else n

    span = (0.0, float(SMALL - 1))
    return tiles.interval(leaf(node), tiles.Box(span, span, span, span), {})


def truth(term: Term) -> str:
    return term.code if term.kind == "bool" else f"({term.code} != 0)"


def join(*terms: Term) -> str:
    """The kind in which these meet as numbers."""
    kinds = {t.kind for t in terms}
    return "float" if "float" in kinds else "long" if "long" in kinds else "int"


def as_number(term: Term) -> Term:
    return Term(term.code, "int") if term.kind == "bool" else term


def cast(term: Term, kind: str) -> str:
    if kind == "float" and term.code.isdigit():
        return number(float(term.code))
    same = term.kind == kind or (term.kind == "bool" and kind == "int")
    return term.code if same else f"(({TYPES[kind]}){term.code})"


def bits(term: Term) -> str:
    return f"(uint32_t)(int64_t){term.code}" if term.kind == "float" else f"(uint32_t){term.code}"
