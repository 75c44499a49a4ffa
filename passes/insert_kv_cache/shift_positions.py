"""Values that depend on token positions, computed from the positions of the given tokens.

`arange(T)`, `table[:T]`, a running count: the analysis gives an element of each as a formula of the position
t. This module emits the formula as operations on a vector of positions, so that a graph can be given any
tokens of any sequences. Used by `insert_kv_cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from attngraph.ir.language.expr import Expr
from attngraph.meaning.attention.program import within
from attngraph.meaning.element import Meaning
from attngraph.meaning.tokens.axes import Space
from attngraph.meaning.tokens.facts import Fact
from attngraph.passes.build import Builder

aten = torch.ops.aten


class NotWritten(Exception):
    """A formula with something that cannot be written as operations on tensors."""


def emit(
    builder: Builder, meaning: Meaning, space: Space, node: fx.Node, fact: Fact, positions: fx.Node
) -> fx.Node:
    """A node with `node`'s values at `positions` (int64, `[N]`) instead of at 0 .. T - 1.

    Raises:
        NotWritten: the formula cannot be written as operations on tensors.
    """
    assert fact.formula is not None
    return Emitter(builder, meaning, space, node, fact, positions).emit()


class Emitter:
    """Writes one formula as operations; `read` decides how elements of tensors are obtained."""

    def __init__(
        self, builder: Builder, meaning: Meaning, space: Space, node: fx.Node, fact: Fact, positions: fx.Node
    ) -> None:
        self.builder, self.space, self.node, self.fact = builder, space, node, fact
        self.meaning, self.guarded = meaning, False
        self.shape = meaning.shape(node)
        self.positions = positions
        self.made: dict[tuple[bool, Expr], Any] = {}

    def emit(self) -> fx.Node:
        assert self.fact.formula is not None
        digits = [d for dim in self.fact.axes for d in dim]
        if digits.count(self.space.token) != 1 or any(len(dim) > 1 for dim in self.fact.axes):
            raise NotWritten("a dimension that tokens share with something else")
        value = self._value(self.fact.formula)
        call, wanted = self.builder.call, self.node.meta["val"].dtype
        if not isinstance(value, fx.Node):
            raise NotWritten("a number")
        if value.meta["val"].dtype != wanted:
            value = call(aten._to_copy.default, value, dtype=wanted)
        sizes = [
            -1 if digits else self.builder.size(extent)
            for digits, extent in zip(self.fact.axes, self.shape, strict=True)
        ]
        return call(aten.expand.default, self._ranked(value), sizes)

    def _ranked(self, value: fx.Node) -> fx.Node:
        missing = len(self.shape) - value.meta["val"].ndim
        for _ in range(missing):
            value = self.builder.call(aten.unsqueeze.default, value, 0)
        return value

    def _along(self, vector: fx.Node, place: int) -> fx.Node:
        """A vector as a tensor of the node's rank that varies along one dimension."""
        for _ in range(len(self.shape) - 1 - place):
            vector = self.builder.call(aten.unsqueeze.default, vector, -1)
        return vector

    def _value(self, node: Expr) -> Any:
        key = self.guarded, node
        if key not in self.made:
            self.made[key] = self._written(node)
        return self.made[key]

    def _written(self, node: Expr) -> Any:
        call = self.builder.call
        if node.op == "const":
            return float("nan") if node.value == "nan" else node.value
        if node.op == "size":
            return self.builder.size(node)
        if node is self.space.token:
            place = next(p for p, digits in enumerate(self.fact.axes) if node in digits)
            return self._along(self.positions, place)
        if node.op == "var":
            place = int(str(node.value).removeprefix("own"))
            device = self.node.meta["val"].device
            vector = call(aten.arange.default, self.builder.size(node.args[0]), device=device)
            return self._along(vector, place)
        if node.op == "read":
            return self.read(node)
        before, self.guarded = self.guarded, self.guarded or node.op in ("where", "and", "or")
        args = [self._value(a) for a in node.args]
        self.guarded = before
        if not any(isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor) for a in args):
            raise NotWritten(f"{node!r}, which does not depend on the place")
        if node.op in ("add", "mul"):
            return self._folded(node.op, args)
        if node.op in _PAIRS and len(args) == 2:
            if not _is_tensor(args[0]):
                args[0] = call(aten.full_like.default, next(a for a in args if _is_tensor(a)), args[0])
            overload = "Tensor" if _is_tensor(args[1]) else "Scalar"
            if node.op == "floordiv":
                rounded = {"Tensor": aten.div.Tensor_mode, "Scalar": aten.div.Scalar_mode}[overload]
                return call(rounded, *args, rounding_mode="floor")
            return call(getattr(getattr(aten, _PAIRS[node.op]), overload), *args)
        if node.op == "where":
            like = next((a for a in args[1:] if _is_tensor(a)), None)
            if like is None:
                like = call(aten._to_copy.default, args[0], dtype=self._dtype(node))
            dtype = like.meta["val"].dtype
            dtype = self._dtype(node) if any(isinstance(a, float) for a in args[1:]) else dtype
            branches = [
                a if _is_tensor(a) else call(aten.full_like.default, like, a, dtype=dtype) for a in args[1:]
            ]
            return call(aten.where.self, args[0], *branches)
        if node.op == "not":
            return call(aten.logical_not.default, *args)
        if node.op in FUNCTIONS:
            like = next(a for a in args if _is_tensor(a))
            tensors = [a if _is_tensor(a) else call(aten.full_like.default, like, a) for a in args]
            return call(FUNCTIONS[node.op], *tensors)
        raise NotWritten(f"{node.op}")

    def _dtype(self, node: Expr) -> torch.dtype:
        """That of a value of numbers alone."""
        dtype: torch.dtype = self.node.meta["val"].dtype
        known = {"bool": torch.bool, "int": torch.int64}
        return known.get(node.kind, dtype if dtype.is_floating_point else torch.get_default_dtype())

    def _folded(self, op: str, args: list[Any]) -> Any:
        tensors = [a for a in args if _is_tensor(a)]
        value = tensors[0]
        for other in [*tensors[1:], *(a for a in args if not _is_tensor(a))]:
            overload = "Tensor" if _is_tensor(other) else "Scalar"
            value = self.builder.call(getattr(getattr(aten, op), overload), value, other)
        return value

    def read(self, node: Expr) -> fx.Node:
        """An element of a table. All of them are read, also those that a condition does not choose."""
        indices = node.args
        if self.guarded:
            shape = self.meaning.shape(node.value)
            indices = tuple(within(i, extent) for i, extent in zip(indices, shape, strict=True))
        return self._indexed(node.value, [self._value(i) for i in indices])

    def _indexed(self, table: fx.Node, indices: list[Any]) -> fx.Node:
        like = next((a for a in indices if _is_tensor(a)), None)
        if like is None:
            raise NotWritten("an element of a table that does not depend on the place")
        tensors = [
            a if _is_tensor(a) else self.builder.call(aten.full_like.default, like, a) for a in indices
        ]
        found: fx.Node = self.builder.call(aten.index.Tensor, table, tensors)
        return found


FUNCTIONS = {
    "recip": aten.reciprocal.default, "max": aten.maximum.default, "min": aten.minimum.default,
}  # fmt: skip
"""Functions of tensors alone that formulas call otherwise than PyTorch does."""
_PAIRS = {
    "floordiv": "div", "mod": "remainder", "le": "le", "lt": "lt", "eq": "eq", "and": "bitwise_and",
    "or": "bitwise_or",
}  # fmt: skip


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
