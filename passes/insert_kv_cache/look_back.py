"""Values computed from the last tokens (`meaning/tokens/windows.py`), over a cache of those tokens.

A step gets the new tokens with the few before them (`attngraph::with_earlier`). A convolution then runs as
the model has it, on this longer sequence; everything else is computed from its formula, in which an element
of token t - j is the one that stands j places before. Used by `insert_kv_cache`.
"""

import dataclasses
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph import op_name, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.ops.history import with_earlier
from attngraph.meaning.algebra import M, size_expression
from attngraph.meaning.tokens.facts import Fact
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.meaning.tokens.windows import Window
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.kept_values import KeptValues
from attngraph.passes.insert_kv_cache.run_again import rerun
from attngraph.passes.insert_kv_cache.shift_positions import ByIndex
from attngraph.passes.insert_kv_cache.step import Step
from attngraph.passes.insert_kv_cache.step_inputs import StepInputs

aten = torch.ops.aten


def look_back(step: Step, builder: Builder, node: fx.Node, scan: Window) -> tuple[fx.Node, str]:
    """A `Rewrite` of windows of tokens."""
    new = _LookBack(step.tokens, step.inputs, step.kept, builder).replace(node, scan)
    return new, f"{op_name(node)} at {source_of(node)} is computed from the last {scan.latest} tokens"


@dataclasses.dataclass
class _LookBack:
    """The rewriting of one value."""

    tokens: Tokens
    inputs: StepInputs
    kept: KeptValues
    builder: Builder

    def replace(self, node: fx.Node, scan: Window) -> fx.Node:
        assert scan.latest is not None
        place = self._place(scan.latest - 1)
        longer = {n: self._longer(n, place, scan.latest - 1) for n in scan.operands}
        if scan.formula is None:  # the model's own operations on the longer sequence
            done = rerun(self.tokens, self.builder, scan.region, longer)
            axis = self.tokens.space.place(self.tokens[node].axes, self.tokens.space.token)
            return self.builder.call(aten.index_select.default, done[node], axis, place)
        plain = dataclasses.replace(self.tokens[node], formula=self._without_beginning(scan.formula))
        return _WithEarlier(self, node, plain, longer, place).write()

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
            return M.construct(node, args)

        return E.rebuild(formula, leaf)

    def _place(self, back: int) -> fx.Node:
        """Where each new token stands in the longer sequence, `[N]`."""
        call, places = self.builder.call, self.in_order()
        rows_before = call(aten.add.Tensor, self.inputs.rows("row"), 1)
        return call(aten.add.Tensor, places, call(aten.mul.Tensor, rows_before, back))

    def in_order(self) -> fx.Node:
        """The numbers of the new tokens."""
        row = self.inputs.rows("row")
        count = self.builder.call(aten.sym_size.int, row, 0)
        return self.builder.call(aten.arange.default, count, device=row.meta["val"].device)

    def _longer(self, operand: fx.Node, place: fx.Node, back: int) -> fx.Node:
        pages, store = self.kept.pages_of(self.builder, operand)
        axes, space, rows = self.tokens[operand].axes, self.tokens.space, self.inputs.rows
        return self.builder.call(
            with_earlier, pages, operand, self.inputs.table(store.window), rows("starts"), rows("first"),
            place, space.place(axes, space.row), space.place(axes, space.token), back,
        )  # fmt: skip


class _WithEarlier(ByIndex):
    """Writes a formula that reads values at this token and at earlier ones."""

    def __init__(
        self, back: _LookBack, node: fx.Node, fact: Fact, longer: dict[fx.Node, fx.Node], place: fx.Node
    ) -> None:
        tokens = back.tokens
        super().__init__(
            back.builder, tokens.meaning, tokens.space, node, fact, back.inputs.rows("positions")
        )
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
        return self.indexed(value, [self._within(value, d, index) for d, index in enumerate(indices)])

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
        there = self.builder.call(aten.sub.Tensor, self.at_token(self.place), self.value(earlier))
        return self.indexed(self.longer[node.value], [
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
        return self.at_token(self.back.in_order()) if index is self.space.token else self.value(index)
