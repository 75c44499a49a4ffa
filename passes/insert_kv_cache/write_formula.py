"""Formulas, written as operations on tensors.

`Writer` computes a formula once for all its elements: its tensors have the same dimensions, each of extent 1
where the formula does not vary along it. What a function is in PyTorch stands in `ir/language/functions.py`.
How an element of a tensor is read, and what an index is, depends: `FormulaWriter` has the packed tokens of a
step and reads views; `shift_positions.py` has the dimensions of a value and reads by index. Used by
`insert_kv_cache`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.language import Expr, operation_of
from attngraph.meaning.attention.layout import NoView, solve
from attngraph.meaning.element import Meaning
from attngraph.meaning.tokens.facts import Space
from attngraph.passes.build import Builder

aten = torch.ops.aten


class NotWritten(Exception):
    """A formula with something that cannot be written as operations on tensors."""


_TAKES_NUMBERS = {"add": "add", "mul": "mul", "mod": "remainder", "le": "le", "lt": "lt", "eq": "eq"}
"""Operations of a tensor and a tensor or number, with their names in PyTorch."""


def _of_tensors(op: str) -> Callable[..., Any] | None:
    """An operation of tensors alone."""
    row = None if op in ("float", "int", "random") else operation_of(op)
    return torch.reciprocal if op == "recip" else None if row is None else row.torch


class Writer:
    """Writes formulas that share parts.

    Args:
        rank: how many dimensions every tensor has.
        dtype: of numbers that stand beside no other tensor of numbers.
    """

    def __init__(
        self, builder: Builder, meaning: Meaning, space: Space, rank: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.builder, self.meaning, self.space = builder, meaning, space
        self.rank, self.dtype, self.device = rank, dtype, device
        self.is_chosen = False
        """Whether a condition decides if what is being written is used."""
        self._made: dict[tuple[bool, Expr], Any] = {}

    def read(self, node: Expr) -> fx.Node:
        """An element of a tensor.

        Raises:
            NotWritten: it cannot be read here.
        """
        raise NotImplementedError

    def index(self, variable: Expr) -> fx.Node:
        """An index as numbers along its dimension.

        Raises:
            NotWritten: there is no such dimension.
        """
        raise NotImplementedError

    def total(self, node: Expr) -> fx.Node:
        """A sum over a variable."""
        raise NotWritten(node.op)

    def value(self, node: Expr) -> Any:
        """A number, a size, or a tensor."""
        key = self.is_chosen, node
        if key not in self._made:
            self._made[key] = self._value(node)
        return self._made[key]

    def _value(self, node: Expr) -> Any:
        match node.op:
            case "const":
                return float("nan") if node.value == "nan" else node.value
            case "size":
                return self.builder.size(node)
            case "read":
                return self.read(node)
            case "var":
                return self.index(node)
            case "sum":
                return self.total(node)
        before, self.is_chosen = self.is_chosen, self.is_chosen or node.op in ("where", "and", "or")
        args = [self.value(a) for a in node.args]
        self.is_chosen = before
        if not any(map(is_tensor, args)):
            raise NotWritten(f"{node!r}, which is computed from numbers alone,")
        return self._computed(node.op, args)

    def _computed(self, op: str, args: list[Any]) -> fx.Node:
        if op in ("add", "mul"):  # a tensor first
            place = next(place for place, a in enumerate(args) if is_tensor(a))
            args = [args[place], *args[:place], *args[place + 1 :]]
        if op in _TAKES_NUMBERS or op == "floordiv":
            pair = functools.partial(self._pair, op)
            return functools.reduce(pair, args[1:], self.as_tensor(args[0], args))
        function = _of_tensors(op)
        if function is None:
            raise NotWritten(f"the function {op}")
        tensors = [self.as_tensor(a, args) for a in args]
        if op in ("and", "or", "max", "min"):
            return functools.reduce(functools.partial(self.builder.trace, function), tensors)
        return self.builder.trace(function, *tensors)  # type: ignore[no-any-return]

    def _pair(self, op: str, one: fx.Node, other: Any) -> fx.Node:
        overload = "Tensor" if is_tensor(other) else "Scalar"
        if op == "floordiv":
            return self.builder.call(getattr(aten.div, f"{overload}_mode"), one, other, rounding_mode="floor")
        return self.builder.call(getattr(getattr(aten, _TAKES_NUMBERS[op]), overload), one, other)

    def as_tensor(self, value: Any, beside: Sequence[Any]) -> fx.Node:
        """A number as a tensor: whole beside whole numbers."""
        if is_tensor(value):
            return value  # type: ignore[no-any-return]
        dtypes = [a.meta["val"].dtype for a in beside if is_tensor(a)]
        dtype = torch.bool if isinstance(value, bool) else self.dtype
        if not isinstance(value, bool | float) and not any(d.is_floating_point for d in dtypes):
            dtype = torch.int64
        elif isinstance(value, int) and dtype.is_floating_point:
            value = float(value)  # as large as a float32 may be
        return self.builder.call(aten.full.default, [1] * self.rank, value, dtype=dtype, device=self.device)

    def along(self, vector: fx.Node, dim: int) -> fx.Node:
        """A vector as a tensor that varies along one dimension."""
        for _ in range(self.rank - 1 - dim):
            vector = self.builder.call(aten.unsqueeze.default, vector, -1)
        return vector


class FormulaWriter(Writer):
    """Writes formulas of one token as tensors `[1, tokens, *variables]`. `dtype`: what floating values are
    converted to before anything is computed."""

    def __init__(
        self, builder: Builder, meaning: Meaning, space: Space, variables: tuple[Expr, ...],
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(builder, meaning, space, 2 + len(variables), dtype, device)
        self.variables = variables

    def tensor(self, formula: Expr, variables: tuple[Expr, ...]) -> fx.Node:
        """`[tokens, *variables]`, in which the formula may use no other variables."""
        call = self.builder.call
        value = self.value(formula)
        if not is_tensor(value):
            value = call(aten.full.default, [1] * self.rank, value, dtype=self.dtype, device=self.device)
        value = self._converted(value)
        for place in reversed(range(len(self.variables))):
            if self.variables[place] not in variables:
                value = call(aten.squeeze.dim, value, 2 + place)
        tokens = self.builder.size(self.space.tokens)
        kept = [v for v in self.variables if v in variables]
        sizes = [tokens, *(self.builder.size(v.args[0]) for v in kept)]
        value = call(aten.expand.default, call(aten.select.int, value, 0, 0), sizes)
        order = [0, *(1 + kept.index(v) for v in variables)]
        return value if order == sorted(order) else call(aten.permute.default, value, order)

    def _converted(self, value: fx.Node) -> fx.Node:
        return self.builder.trace(lambda x: x.to(self.dtype), value)  # type: ignore[no-any-return]

    def index(self, variable: Expr) -> fx.Node:
        """The index along one of the variables."""
        if variable not in self.variables:
            raise NotWritten("the place of a token or a sequence as a number")
        count, dim = self.builder.size(variable.args[0]), 2 + self.variables.index(variable)
        value = self.builder.call(aten.arange.default, count, dtype=self.dtype, device=self.device)
        value = self.along(value, dim)
        for _ in range(dim):
            value = self.builder.call(aten.unsqueeze.default, value, 0)
        return value

    def total(self, node: Expr) -> fx.Node:
        """A sum, as one over the last dimension of a tensor with one dimension more."""
        variable, body = node.args
        variables = (*self.variables, variable)
        inner = FormulaWriter(
            self.builder, self.meaning, self.space, variables, self.dtype, self.device
        ).value(body)  # fmt: skip
        count = self.builder.size(variable.args[0])
        if not is_tensor(inner):
            raise NotWritten("a sum of numbers")
        total = self.builder.call(aten.sum.dim_IntList, inner, [-1])
        varies = variable in body.free and inner.meta["val"].shape[-1] != 1
        return total if varies else self.builder.call(aten.mul.Scalar, total, count)

    def read(self, node: Expr) -> fx.Node:
        """An element of the token, as a view."""
        places = (self.space.row, self.space.token, *self.variables)
        used = [v for v in places if v is not None and any(v in index.free for index in node.args)]
        if any(n not in used for index in node.args for n in index.free):
            raise NotWritten("an element at another place")
        try:
            steps = solve(self.meaning.shape(node.value), node.args, tuple((v,) for v in used))
        except NoView:
            raise NotWritten("elements that are no view of a tensor") from None
        value = self.builder.view(node.value, steps)
        if value.meta["val"].dtype.is_floating_point and self.dtype.is_floating_point:
            value = self._converted(value)
        for place, variable in enumerate(places):
            if variable not in used:
                value = self.builder.call(aten.unsqueeze.default, value, place)
        return value


def is_tensor(value: Any) -> bool:
    """Whether a value is a node with a tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
