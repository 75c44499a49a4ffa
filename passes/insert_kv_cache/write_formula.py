"""Formulas, written as operations on tensors.

`Writer` computes a formula once for all its elements: its tensors have the same dimensions, each of extent 1
where the formula does not vary along it. What a function is in PyTorch stands in `ir/language/functions.py`.
How an element of a tensor is read, and what an index is, depends: `FormulaWriter` has the packed tokens of a
step and reads views; `ByIndex` has the dimensions of a value that follows from positions (`arange(T)`,
`table[:T]`, a running count) and reads by index, at any positions. Used by `insert_kv_cache`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.language import Expr, operation_of
from attngraph.meaning.attention.layout import NoView, solve
from attngraph.meaning.attention.program import within
from attngraph.meaning.tokens.facts import Fact
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder

aten = torch.ops.aten


class NotWritten(Exception):
    """A formula with something that cannot be written as operations on tensors."""


_TAKES_NUMBERS = {"add": "add", "mul": "mul", "mod": "remainder", "le": "le", "lt": "lt", "eq": "eq"}
"""Operations of a tensor and a tensor or number, with their names in PyTorch."""


class Writer:
    """Writes formulas that share parts.

    Args:
        rank: how many dimensions every tensor has.
        dtype: of numbers that stand beside no other tensor of numbers.
    """

    def __init__(self, builder: Builder, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.builder, self.rank, self.dtype, self.device = builder, rank, dtype, device
        self.is_chosen = False
        """Whether a condition decides if what is being written is used."""
        self._made: dict[tuple[bool, Expr], Any] = {}

    def read(self, node: Expr) -> fx.Node:
        """An element of a tensor. Raises `NotWritten`: it cannot be read here."""
        raise NotImplementedError

    def index(self, variable: Expr) -> fx.Node:
        """An index as numbers along its dimension. Raises `NotWritten`: there is no such dimension."""
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
        row = None if op in ("float", "int", "random") else operation_of(op)
        if row is None and op != "recip":
            raise NotWritten(f"the function {op}")
        function = torch.reciprocal if row is None else row.torch
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
        return self._full(value, dtype)

    def _full(self, value: Any, dtype: torch.dtype) -> fx.Node:
        return self.builder.call(aten.full.default, [1] * self.rank, value, dtype=dtype, device=self.device)

    def along(self, vector: fx.Node, dim: int) -> fx.Node:
        """A vector as a tensor that varies along one dimension."""
        return self.builder.unsqueezed(vector, *[-1] * (self.rank - 1 - dim))


class FormulaWriter(Writer):
    """Writes formulas of one token as tensors `[1, tokens, *variables]`. `dtype`: what floating values are
    converted to before anything is computed."""

    def __init__(
        self, builder: Builder, tokens: Tokens, variables: tuple[Expr, ...], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(builder, 2 + len(variables), dtype, device)
        self.tokens, self.variables = tokens, variables

    def tensor(self, formula: Expr, variables: tuple[Expr, ...]) -> fx.Node:
        """`[tokens, *variables]`, in which the formula may use no other variables."""
        value = self.value(formula)
        value = self.builder.to(value if is_tensor(value) else self._full(value, self.dtype), self.dtype)
        for place in reversed(range(len(self.variables))):
            if self.variables[place] not in variables:
                value = self.builder.call(aten.squeeze.dim, value, 2 + place)
        kept = [v for v in self.variables if v in variables]
        sizes = [self.builder.size(n) for n in (self.tokens.space.tokens, *(v.args[0] for v in kept))]
        value = self.builder.trace(lambda x, sizes: x.select(0, 0).expand(sizes), value, sizes)
        return self.builder.permuted(value, [0, *(1 + kept.index(v) for v in variables)])

    def index(self, variable: Expr) -> fx.Node:
        """The index along one of the variables."""
        if variable not in self.variables:
            raise NotWritten("the place of a token or a sequence as a number")
        count, dim = self.builder.size(variable.args[0]), 2 + self.variables.index(variable)
        value = self.builder.call(aten.arange.default, count, dtype=self.dtype, device=self.device)
        return self.builder.unsqueezed(self.along(value, dim), *[0] * dim)

    def total(self, node: Expr) -> fx.Node:
        """A sum, as one over the last dimension of a tensor with one dimension more."""
        variable, body = node.args
        variables = (*self.variables, variable)
        inner = FormulaWriter(self.builder, self.tokens, variables, self.dtype, self.device).value(body)
        count = self.builder.size(variable.args[0])
        if not is_tensor(inner):
            raise NotWritten("a sum of numbers")
        total = self.builder.call(aten.sum.dim_IntList, inner, [-1])
        varies = variable in body.free and inner.meta["val"].shape[-1] != 1
        return total if varies else self.builder.call(aten.mul.Scalar, total, count)

    def read(self, node: Expr) -> fx.Node:
        """An element of the token, as a view."""
        places = (self.tokens.space.row, self.tokens.space.token, *self.variables)
        used = [v for v in places if v is not None and any(v in index.free for index in node.args)]
        if any(n not in used for index in node.args for n in index.free):
            raise NotWritten("an element at another place")
        try:
            steps = solve(self.tokens.meaning.shape(node.value), node.args, tuple((v,) for v in used))
        except NoView:
            raise NotWritten("elements that are no view of a tensor") from None
        value = self.builder.view(node.value, steps)
        if value.meta["val"].dtype.is_floating_point and self.dtype.is_floating_point:
            value = self.builder.to(value, self.dtype)
        return self.builder.unsqueezed(value, *(place for place, v in enumerate(places) if v not in used))


class ByIndex(Writer):
    """Writes the formula of one value, with the value's dimensions, at `positions` (int64, `[N]`) instead of
    at 0 .. T - 1; tables are read by index."""

    def __init__(
        self, builder: Builder, tokens: Tokens, node: fx.Node, fact: Fact, positions: fx.Node
    ) -> None:
        self.meaning, self.space, self.fact, self.positions = tokens.meaning, tokens.space, fact, positions
        self.shape, self.wanted = self.meaning.shape(node), node.meta["val"].dtype
        dtype = self.wanted if self.wanted.is_floating_point else torch.get_default_dtype()
        super().__init__(builder, len(self.shape), dtype, node.meta["val"].device)

    def write(self) -> fx.Node:
        """The value. Raises `NotWritten`: the formula cannot be written as operations on tensors."""
        assert self.fact.formula is not None
        digits = [d for dim in self.fact.axes for d in dim]
        if digits.count(self.space.token) != 1 or any(len(dim) > 1 for dim in self.fact.axes):
            raise NotWritten("a dimension that tokens share with something else")
        value = self.value(self.fact.formula)
        if not is_tensor(value):
            raise NotWritten("a number")
        axes = zip(self.fact.axes, self.shape, strict=True)
        sizes = [-1 if digits else self.builder.size(extent) for digits, extent in axes]
        value = self.builder.to(value, self.wanted)
        value = self.builder.unsqueezed(value, *[0] * (self.rank - value.meta["val"].ndim))
        return self.builder.call(aten.expand.default, value, sizes)

    def as_tensor(self, value: Any, beside: Sequence[Any]) -> fx.Node:
        """A number as a tensor like the one beside it, other than a condition."""
        if is_tensor(value):
            return value  # type: ignore[no-any-return]
        tensors = sorted(filter(is_tensor, beside), key=lambda a: a.meta["val"].dtype == torch.bool)
        like: torch.dtype = tensors[0].meta["val"].dtype
        dtype = like
        if isinstance(value, float) and not like.is_floating_point:
            dtype = self.dtype
        elif like == torch.bool and not isinstance(value, bool):
            dtype = torch.int64
        asked = {} if dtype == like else {"dtype": dtype}
        return self.builder.call(aten.full_like.default, tensors[0], value, **asked)

    def at_token(self, vector: fx.Node) -> fx.Node:
        """A vector with an entry for each token."""
        return self.along(vector, next(p for p, d in enumerate(self.fact.axes) if self.space.token in d))

    def index(self, variable: Expr) -> fx.Node:
        """The token's position, or the index along a dimension of the value."""
        if variable is self.space.token:
            return self.at_token(self.positions)
        dim, count = int(str(variable.value).removeprefix("own")), self.builder.size(variable.args[0])
        return self.along(self.builder.call(aten.arange.default, count, device=self.device), dim)

    def read(self, node: Expr) -> fx.Node:
        """An element of a table. All of them are read, also those that a condition does not choose."""
        indices = node.args
        if self.is_chosen:
            shape = self.meaning.shape(node.value)
            indices = tuple(within(i, extent) for i, extent in zip(indices, shape, strict=True))
        return self.indexed(node.value, [self.value(i) for i in indices])

    def indexed(self, table: fx.Node, indices: list[Any]) -> fx.Node:
        """Elements of a table."""
        if not any(map(is_tensor, indices)):
            raise NotWritten("an element of a table that does not depend on the place")
        return self.builder.call(aten.index.Tensor, table, [self.as_tensor(i, indices) for i in indices])


def is_tensor(value: Any) -> bool:
    """Whether a value is a node with a tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def extent_of(*variables: Expr) -> int:
    """How many values the variables have together. Raises `NotWritten`: no number says how many."""
    if any(v.args[0].op != "const" for v in variables):
        raise NotWritten("an axis whose length is not a number")
    return math.prod(int(v.args[0].value) for v in variables)
