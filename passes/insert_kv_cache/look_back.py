"""Values computed from the last tokens (`meaning/tokens/windows.py`), over a cache of those tokens.

A step gets the new tokens with the few before them (`attngraph::with_earlier`). A convolution then runs as
the model has it, on this longer sequence; everything else is computed from its formula, in which an element
of token t - j is the one that stands j places before. Used by `insert_kv_cache`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.ops.cached_attention import Store
from attngraph.ir.ops.with_earlier import with_earlier
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.tokens.facts import Fact, Window
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.run_again import rerun
from attngraph.passes.insert_kv_cache.shift_positions import Emitter
from attngraph.passes.insert_kv_cache.step_inputs import StepInputs

aten = torch.ops.aten


@dataclasses.dataclass
class LookBack:
    """Rewrites the values of one graph.

    `pages_of` gives an operand's pages, as a view of what is stored, and the store.
    """

    tokens: Tokens
    inputs: StepInputs
    pages_of: Callable[[Builder, fx.Node], tuple[fx.Node, Store]]

    def replace(self, builder: Builder, node: fx.Node, fact: Fact) -> fx.Node:
        """The node that computes the value for new tokens.

        Raises:
            NoFormula: its formula cannot be written as operations on tensors.
        """
        assert isinstance(fact.scan, Window)
        place = self._place(builder, fact.scan.width - 1)
        longer = {n: self._longer(builder, n, place, fact.scan.width - 1) for n in fact.scan.operands}
        if fact.scan.formula is None:
            return self._rerun(builder, node, fact.scan, longer, place)
        plain = dataclasses.replace(fact, formula=self._without_beginning(fact.scan.formula))
        return _WithEarlier(self, builder, node, plain, longer, place).emit()

    def _without_beginning(self, formula: Expr) -> Expr:
        """The formula without what chooses zero before the first token: a longer sequence has zeros there."""
        token = self.tokens.space.token

        def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
            if node.op == "where":
                condition, chosen, other = args
                for inside, read, outside in ((M.not_(condition), other, chosen), (condition, chosen, other)):
                    if read.op == "read" and E.is_const(outside, 0):
                        steps = (M.sub(token, index) for index in read.args if token in index.free)
                        if any(n.op == "const" and inside is M.le(n, token) for n in steps):
                            return read
            return M.construct(node, args) if args and args != node.args else node

        return E.rebuild(formula, leaf)

    def _place(self, builder: Builder, back: int) -> fx.Node:
        """Where each new token stands in the longer sequence, `[N]`."""
        row = self.inputs.rows("row")
        places = self._tokens_in_order(builder)
        return builder.call(aten.add.Tensor, places, builder.call(aten.mul.Tensor,
                            builder.call(aten.add.Tensor, row, 1), back))  # fmt: skip

    def _tokens_in_order(self, builder: Builder) -> fx.Node:
        row = self.inputs.rows("row")
        count = builder.call(aten.sym_size.int, row, 0)
        return builder.call(aten.arange.default, count, device=row.meta["val"].device)

    def _longer(self, builder: Builder, operand: fx.Node, place: fx.Node, back: int) -> fx.Node:
        pages, store = self.pages_of(builder, operand)
        axes, space = self.tokens[operand].axes, self.tokens.space
        rows = self.inputs.rows
        return builder.call(
            with_earlier, pages, operand, self.inputs.table(store.window), rows("starts"), rows("first"),
            place, space.place(axes, space.row), space.place(axes, space.token), back,
        )  # fmt: skip

    def _rerun(
        self, builder: Builder, node: fx.Node, window: Window, longer: dict[fx.Node, fx.Node], place: fx.Node
    ) -> fx.Node:
        """The model's own operations on the longer sequence, and the results of the new tokens."""
        done = rerun(self.tokens, builder, window.region, longer)
        axis = self.tokens.space.place(self.tokens[node].axes, self.tokens.space.token)
        return builder.call(aten.index_select.default, done[node], axis, place)


class _WithEarlier(Emitter):
    """Writes a formula that reads values at this token and at earlier ones."""

    def __init__(
        self, back: LookBack, builder: Builder, node: fx.Node, fact: Fact, longer: dict[fx.Node, fx.Node],
        place: fx.Node,
    ) -> None:  # fmt: skip
        tokens = back.tokens
        super().__init__(builder, tokens.meaning, tokens.space, node, fact, back.inputs.rows("positions"))
        self.back, self.longer, self.place = back, longer, place
        self.shifted: dict[tuple[fx.Node, int], fx.Node] = {}

    def read(self, node: Expr) -> fx.Node:
        """An element of a table, or of a value at this or an earlier token."""
        fact = self.back.tokens.facts[node.value]
        if not any(fact.axes):
            return super().read(node)
        value: fx.Node
        dim = self.space.place(fact.axes, self.space.token)
        if dim is None:
            value, indices = node.value, list(node.args)
        else:
            earlier = M.sub(self.space.token, node.args[dim])
            if earlier.op != "const":
                return self._at_each_place(node, dim, earlier)
            value = self._shifted(node.value, dim, int(earlier.value))
            indices = [self.space.token if place == dim else a for place, a in enumerate(node.args)]
        if self._is_whole(value, indices):
            return value
        return self._indexed(value, [self._within(value, d, index) for d, index in enumerate(indices)])

    def _shifted(self, value: fx.Node, dim: int, earlier: int) -> fx.Node:
        """The value that each token's predecessor `earlier` places before has; zero before the first."""
        if earlier == 0:
            return value
        if (value, earlier) not in self.shifted:
            there = self.builder.call(aten.sub.Tensor, self.place, earlier)
            self.shifted[value, earlier] = self.builder.call(
                aten.index_select.default, self.longer[value], dim, there
            )
        return self.shifted[value, earlier]

    def _at_each_place(self, node: Expr, dim: int, earlier: Expr) -> fx.Node:
        """Elements of tokens that stand before the own one by another number at each place of a window."""
        own = next(p for p, digits in enumerate(self.fact.axes) if self.space.token in digits)
        there = self.builder.call(aten.sub.Tensor, self._along(self.place, own), self._value(earlier))
        return self._indexed(self.longer[node.value], [
            there if d == dim else self._within(node.value, d, index) for d, index in enumerate(node.args)
        ])  # fmt: skip

    def _is_whole(self, value: fx.Node, indices: list[Expr]) -> bool:
        """Whether these indices read every element of the value at its own place in the result."""
        if value.meta["val"].ndim != len(self.shape):
            return False
        for place, (index, extent) in enumerate(zip(indices, value.meta["val"].shape, strict=True)):
            own = E.is_const(index, 0) and size_expression(extent) is E.ONE
            if not own and index is not E.var(f"own{place}", self.shape[place]):
                digits = self.fact.axes[place]
                if digits != (index,):
                    return False
        return True

    def _within(self, value: fx.Node, dim: int, index: Expr) -> Any:
        """An index as a place that there is: beyond the ends, formulas choose something else."""
        if index is self.space.row:
            return 0
        written = self._in_order(index)
        if index.op in ("var", "const"):
            return written
        return self.builder.call(aten.clamp.default, written, 0, value.meta["val"].shape[dim] - 1)

    def _in_order(self, index: Expr) -> Any:
        if index is not self.space.token:
            return self._value(index)
        place = next(p for p, digits in enumerate(self.fact.axes) if index in digits)
        return self._along(self.back._tokens_in_order(self.builder), place)
