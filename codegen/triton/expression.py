"""Expressions of the score language as Triton.

Index variables keep their names: `b` and `h` are scalars, `q` is a column `[BLOCK_Q, 1]`, `k` a row
`[1, BLOCK_K]` (or the reverse, where tiles are transposed), and everything else broadcasts as it does in
`ir/language/evaluate.py`. Each read has a line of its own, before the loop over keys if it does not depend on
the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from attngraph.codegen.scalar.chain import use_score
from attngraph.codegen.scalar.form import Lowering, Place, Scalar
from attngraph.codegen.scalar.read_ranges import follows_from_data
from attngraph.codegen.scalar.writer import ATOM, COMPARE, PRODUCT, SIGN, SUM
from attngraph.codegen.scalar.writer import Writer as Common
from attngraph.codegen.triton.helpers import HELPERS
from attngraph.codegen.triton.plan import Plan, is_checked_at_launch
from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.functions import Operation

_TYPES = {"int": "tl.int32", "long": "tl.int64", "float": "tl.float32", "double": "tl.float64"}
_READS = {"bool": "bool", "int": "long", "half": "float", "float": "float", "double": "double"}
"""The kind in which elements of a read are computed with."""
_MEETING = E.COMPARISONS | {
    "add", "sub", "mul", "min", "max", "where", "quotient", "remainder", "floordiv", "mod",
}  # fmt: skip
"""Operations in which Triton converts the narrower operand; the last two only for integers."""


class Writer(Common):
    """Writes the formulas of one kernel. `before` collects lines that come before the loop over
    keys, `inside` those of the current loop body, `calls` the helpers used."""

    binds: Mapping[str, int] = {
        "or": 2, "and": 4, "add": SUM, "sub": SUM, "mul": PRODUCT, "div": PRODUCT, "quotient": PRODUCT,
        "remainder": PRODUCT, "neg": SIGN, "not": SIGN, **dict.fromkeys(E.COMPARISONS, COMPARE),
    }  # fmt: skip

    choice = "tl.where({}, {}, {})"

    def __init__(self, plan: Plan, tile: str) -> None:
        """`tile`: the names of a tile's extents, rows first."""
        self.plan, self.tile = plan, tile
        self.reads = {read.number: read for read in plan.reads}
        index = "long" if plan.wide else "int"
        super().__init__(Lowering(lambda n: _READS[self.reads[n].kind], index, powers_by_exp2=True))
        self.before: list[str] = []
        self.inside: list[str] = []
        self.calls: set[str] = set()
        self._labels: dict[Scalar, str] = {}

    def begin_body(self) -> None:
        self.inside = []
        self.names = {v: code for v, code in self.names.items() if not v.place & Place.TILE}

    def forget(self) -> None:
        """Start another kernel, without lines or names."""
        self.inside, self.before, self.names = [], [], {}

    def line(self, code: str) -> None:
        self.inside.append(code)

    def declare(self, name: str, code: str, is_truth: bool = False) -> None:
        self.line(f"{name} = {code}")

    def score(self, formula: Expr) -> str:
        """A formula as a tile of scores."""
        code = self.real(formula)
        return code if use_score(formula) else f"tl.zeros([{self.tile}], tl.float32) + {code}"

    def leaf(self, value: Scalar) -> tuple[str, int]:
        node = value.source
        if value.op == "name":
            if node.op == "p":
                raise UnsupportedError("the weight `p` inside this expression")
            return str(node.value or node.op), ATOM
        if value.kind == "long":
            return f"tl.cast({node.value!r}, tl.int64)", ATOM
        number = float(node.value) if value.kind == "float" else node.value
        is_finite = value.kind != "float" or math.isfinite(number)
        code = repr(number) if is_finite else f'float("{number!r}")'
        return code, SIGN if code.startswith("-") else ATOM

    def cast(self, value: Scalar) -> tuple[str, int]:
        (arg,) = value.args
        if arg.op == "const" and value.kind == "float":
            return self.leaf(Scalar("const", (), "float", value.place, arg.source))
        return f"tl.cast({self.code(arg)}, {_TYPES[value.kind]})", ATOM

    def operand(self, parent: Scalar, value: Scalar, level: int) -> str:
        """An operand's source, without a cast that Triton's operation makes by itself."""
        own = [self.lower(a.source) is a for a in parent.args[parent.op == "where" :]]
        meets = parent.op in _MEETING and (parent.is_whole or parent.op not in ("floordiv", "mod"))
        if value.op == "cast" and self.lower(value.source) is not value and value.args[0].kind != "bool":
            value = value.args[0] if parent.op == "div" or (meets and any(own)) else value
        return self.code(value, level)

    def spell(self, value: Scalar) -> tuple[str, int]:
        truths = [a.op == "cast" and a.args[0].kind == "bool" for a in value.args]
        if value.op in ("add", "sub", "mul") and all(truths):
            formula = E.format_expr(value.source)
            raise UnsupportedError(f"arithmetic of two truth values: `{formula}`")
        return super().spell(value)

    def spelling(self, row: Operation, is_whole: bool) -> str:
        found = row.triton if isinstance(row.triton, str) else row.triton[is_whole]
        if row.triton_half and self.plan.dtype is not torch.float32:
            found = row.triton_half
        self.calls |= HELPERS.keys() & set(re.findall(r"(?<![.\w])\w+(?=\()", found))
        return found

    def is_named(self, value: Scalar) -> bool:
        return value.op == "read" or (not value.is_leaf and self.uses(value) > 1)

    def name(self, value: Scalar, code: str) -> str:
        """Write a line before the loop over keys, or inside it. A value keeps its name in another body."""
        if value not in self._labels:
            self._label(value, f"r{value.source.value}_at" if value.op == "read" else "t")
        label = self._labels[value]
        (self.inside if value.place & Place.TILE else self.before).append(f"{label} = {code}")
        return label

    def _label(self, value: Scalar, prefix: str) -> None:
        taken = sum(label.rstrip("0123456789") == prefix for label in self._labels.values())
        self._labels.setdefault(value, f"{prefix}{taken}")

    def read(self, value: Scalar) -> str:
        """A masked load: nothing is loaded for an index out of range. One that follows from positions is out
        of range only where the value is not used (`read_ranges.py`); for one that follows from data the value
        is NaN, so that the result shows it."""
        read = self.reads[value.source.value]
        name = f"r{read.number}"
        address, inside, other = [name], [], "0"
        for axis, (node, index) in enumerate(zip(value.source.args, value.args, strict=True)):
            if node.op == "const" and node.value < 0:
                raise UnsupportedError(f"a negative index: `{E.format_expr(value.source)}`")
            if not index.is_leaf and index.op != "read":
                self._label(index, "i")
            code = self.atom(index)
            if node.op not in ("var", "const") and self.lower.bounds(node)[0] < 0:
                inside.append(f"({code} >= 0)")
            place = f"tl.cast({code}, tl.int64)" if read.wide else code
            address.append(f"{place} * {name}_stride{axis}")
            if follows_from_data(node):
                other = 'float("nan")' if read.kind in ("half", "float", "double") else other
            if not is_checked_at_launch(node):
                inside.append(f"({code} < {name}_size{axis})")
        mask = f", mask={' & '.join(inside)}, other={other}" if inside else ""
        load = f"tl.load({' + '.join(address)}{mask})"
        wider = {"int": f"tl.cast({load}, tl.int64)", "half": f"tl.cast({load}, tl.float32)"}
        return f"{load} != 0" if read.kind == "bool" else wider.get(read.kind, load)
