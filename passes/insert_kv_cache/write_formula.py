"""Formulas of one token, written as operations on the packed tokens of a step.

A formula reads values at its own token, tables, and runs over other axes of the model. Written here, it is a
tensor `[tokens, ...]` with one dimension for each of the wanted variables. Used by `insert_kv_cache`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from attngraph.ir.language.expr import Expr
from attngraph.meaning.attention.layout import NoView, solve
from attngraph.meaning.element import Meaning
from attngraph.meaning.tokens.axes import Space
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.shift_positions import FUNCTIONS, NotWritten

aten = torch.ops.aten


@dataclasses.dataclass
class FormulaWriter:
    """Writes formulas that share parts.

    Every tensor that is made has the dimensions `[1, tokens, *variables]`, each of extent 1 where the formula
    does not vary along it. `dtype`: what floating values are converted to before anything is computed.
    """

    builder: Builder
    meaning: Meaning
    space: Space
    variables: tuple[Expr, ...]
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self._made: dict[Expr, Any] = {}

    def tensor(self, formula: Expr, variables: tuple[Expr, ...]) -> fx.Node:
        """`[tokens, *variables]`, in which the formula may use no other variables."""
        call = self.builder.call
        value = self._value(formula)
        if not _is_tensor(value):
            value = call(aten.full.default, [1] * (2 + len(self.variables)), value, dtype=self.dtype,
                         device=self.device)  # fmt: skip
        if value.meta["val"].dtype != self.dtype:
            value = call(aten._to_copy.default, value, dtype=self.dtype)
        for place in reversed(range(len(self.variables))):
            if self.variables[place] not in variables:
                value = call(aten.squeeze.dim, value, 2 + place)
        tokens = self.builder.size(self.space.tokens)
        kept = [v for v in self.variables if v in variables]
        sizes = [tokens, *(self.builder.size(v.args[0]) for v in kept)]
        value = call(aten.expand.default, call(aten.select.int, value, 0, 0), sizes)
        order = [0, *(1 + kept.index(v) for v in variables)]
        return value if order == sorted(order) else call(aten.permute.default, value, order)

    def _value(self, node: Expr) -> Any:
        if node not in self._made:
            self._made[node] = self._written(node)
        return self._made[node]

    def _written(self, node: Expr) -> Any:
        match node.op:
            case "const":
                return float("nan") if node.value == "nan" else node.value
            case "size":
                return self.builder.size(node)
            case "read":
                return self._read(node)
            case "var":
                return self._index(node)
            case "sum":
                return self._sum(node)
        args = [self._value(a) for a in node.args]
        if not any(map(_is_tensor, args)):
            raise NotWritten(f"{node.op} of numbers")
        return self._computed(node.op, args)

    def _computed(self, op: str, args: list[Any]) -> Any:
        call = self.builder.call
        like = next(a for a in args if _is_tensor(a))
        if op in ("add", "mul"):
            value = like
            rest = list(args)
            rest.remove(like)
            for other in rest:
                value = call(
                    getattr(getattr(aten, op), "Tensor" if _is_tensor(other) else "Scalar"), value, other
                )
            return value
        tensors = [a if _is_tensor(a) else self._number(a, args) for a in args]
        if op == "where":
            return call(aten.where.self, *tensors)
        if op == "pow":
            return call(aten.pow.Tensor_Tensor, *tensors)
        target = _NAMED.get(op)
        if target is None and len(tensors) == 1:
            target = getattr(getattr(aten, op, None), "default", None)
        if target is None:
            raise NotWritten(f"the function {op}")
        return call(target, *tensors)

    def _number(self, value: Any, args: list[Any]) -> fx.Node:
        """A number beside the tensors among `args`, of which some may be conditions: whole beside whole
        numbers."""
        others = [a.meta["val"].dtype for a in args if _is_tensor(a)]
        dtype = torch.bool if isinstance(value, bool) else self.dtype
        if not isinstance(value, bool | float) and not any(d.is_floating_point for d in others):
            dtype = torch.int64
        elif isinstance(value, int) and dtype.is_floating_point:
            value = float(value)  # as large as a float32 may be
        shape = [1] * (2 + len(self.variables))
        made: fx.Node = self.builder.call(aten.full.default, shape, value, dtype=dtype, device=self.device)
        return made

    def _index(self, variable: Expr) -> fx.Node:
        """The index along one of the variables, as numbers."""
        if variable not in self.variables:
            raise NotWritten("the place of a token or a sequence as a number")
        call = self.builder.call
        count = self.builder.size(variable.args[0])
        value = call(aten.arange.default, count, dtype=self.dtype, device=self.device)
        for _ in self.variables[self.variables.index(variable) + 1 :]:
            value = call(aten.unsqueeze.default, value, -1)
        for _ in (None, None, *self.variables[: self.variables.index(variable)]):
            value = call(aten.unsqueeze.default, value, 0)
        return value

    def _sum(self, node: Expr) -> fx.Node:
        variable, body = node.args
        inner = FormulaWriter(
            self.builder, self.meaning, self.space, (*self.variables, variable), self.dtype, self.device
        )
        value = inner._value(body)
        count = self.builder.size(variable.args[0])
        if not _is_tensor(value):
            raise NotWritten("a sum of numbers")
        size = value.meta["val"].shape[-1]
        total: fx.Node = self.builder.call(aten.sum.dim_IntList, value, [-1])
        return (
            total if variable in body.free and size != 1 else self.builder.call(aten.mul.Scalar, total, count)
        )

    def _read(self, node: Expr) -> fx.Node:
        source: fx.Node = node.value
        call = self.builder.call
        shape = self.meaning.shape(source)
        used = [v for v in (self.space.row, self.space.token, *self.variables)
                if v is not None and any(v in index.free for index in node.args)]  # fmt: skip
        if any(n not in used for index in node.args for n in index.free):
            raise NotWritten("an element at another place")
        try:
            steps = solve(shape, node.args, tuple((v,) for v in used))
        except NoView:
            raise NotWritten("elements that are no view of a tensor") from None
        value = self.builder.view(source, steps)
        dtype = value.meta["val"].dtype
        if dtype.is_floating_point and dtype != self.dtype and self.dtype.is_floating_point:
            value = call(aten._to_copy.default, value, dtype=self.dtype)
        for place, variable in enumerate((self.space.row, self.space.token, *self.variables)):
            if variable not in used:
                value = call(aten.unsqueeze.default, value, place)
        return value


_NAMED: dict[str, Any] = FUNCTIONS | {
    "le": aten.le.Tensor, "lt": aten.lt.Tensor, "eq": aten.eq.Tensor, "and": aten.logical_and.default,
    "or": aten.logical_or.default, "not": aten.logical_not.default, "mod": aten.remainder.Tensor,
}  # fmt: skip


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
