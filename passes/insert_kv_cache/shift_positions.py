"""Values that depend on token positions, computed from the positions of the given tokens.

`arange(T)`, `table[:T]`, a running count: the analysis gives an element of each as a formula of the position
t. This module writes the formula as operations on a vector of positions, so that a graph can be given any
tokens of any sequences. Used by `insert_kv_cache`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.language.expr import Expr
from attngraph.meaning.attention.program import within
from attngraph.meaning.element import Meaning
from attngraph.meaning.tokens.facts import Fact, Space
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.write_formula import NotWritten, Writer, is_tensor

aten = torch.ops.aten


def emit(
    builder: Builder, meaning: Meaning, space: Space, node: fx.Node, fact: Fact, positions: fx.Node
) -> fx.Node:
    """A node with `node`'s values at `positions` (int64, `[N]`) instead of at 0 .. T - 1.

    Raises:
        NotWritten: the formula cannot be written as operations on tensors.
    """
    return ByIndex(builder, meaning, space, node, fact, positions).write()


class ByIndex(Writer):
    """Writes the formula of one value, with the value's dimensions; tables are read by index."""

    def __init__(
        self, builder: Builder, meaning: Meaning, space: Space, node: fx.Node, fact: Fact, positions: fx.Node
    ) -> None:
        self.shape, self.wanted = meaning.shape(node), node.meta["val"].dtype
        dtype = self.wanted if self.wanted.is_floating_point else torch.get_default_dtype()
        super().__init__(builder, meaning, space, len(self.shape), dtype, node.meta["val"].device)
        self.fact, self.positions = fact, positions

    def write(self) -> fx.Node:
        """The value."""
        assert self.fact.formula is not None
        digits = [d for dim in self.fact.axes for d in dim]
        if digits.count(self.space.token) != 1 or any(len(dim) > 1 for dim in self.fact.axes):
            raise NotWritten("a dimension that tokens share with something else")
        value = self.value(self.fact.formula)
        if not is_tensor(value):
            raise NotWritten("a number")
        sizes = [
            -1 if digits else self.builder.size(extent)
            for digits, extent in zip(self.fact.axes, self.shape, strict=True)
        ]
        value = self.builder.trace(lambda x: x.to(self.wanted), value)
        for _ in range(self.rank - value.meta["val"].ndim):
            value = self.builder.call(aten.unsqueeze.default, value, 0)
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
