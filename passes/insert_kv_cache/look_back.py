"""Values that a step computes from earlier tokens anew, over a cache of what they are computed from.

Of the last tokens (`meaning/tokens/windows.py`): a step gets the new tokens with the few before them
(`attngraph::with_earlier`). A convolution then runs as the model has it, on this longer sequence; everything
else is computed from its formula, in which an element of token t - j is the one that stands j places before.

Of all earlier tokens (`looks_back.py`): a step puts together what every row has of all its tokens, one row
below the other, with zeros after the last token of a shorter row (`attngraph::history`). The model's own
operations run on that, as on a batch of whole sequences, and the results of the new tokens are taken. No
token sees a later one, so the zeros change nothing. Used by `insert_kv_cache`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import op_name, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.ops.history import history, with_earlier
from attngraph.meaning.algebra import M, size_expression
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.meaning.tokens.windows import History, Window
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.insert_kv_cache.free_tokens import repeated
from attngraph.passes.insert_kv_cache.step import Step
from attngraph.passes.insert_kv_cache.write_formula import ByIndex

aten = torch.ops.aten


def look_back(step: Step, builder: Builder, node: fx.Node, scan: Window) -> tuple[fx.Node, str]:
    """A `Rewrite` of windows of tokens."""
    assert scan.latest is not None
    tokens, rows, back = step.tokens, step.inputs.rows, scan.latest - 1

    def places(order: Any, row: Any) -> Any:
        """Where each new token stands in the longer sequence, `[N]`."""
        return order + (row + 1) * back

    place = builder.trace(places, _in_order(step, builder), rows("row"))
    longer: dict[fx.Node, fx.Node] = {}
    for operand in scan.operands:
        pages, store = step.kept.pages_of(builder, operand)
        longer[operand] = builder.call(
            with_earlier, pages, operand, step.inputs.table(store.window), rows("starts"), rows("first"),
            place, tokens.row_dim(operand), tokens.token_dim(operand), back,
        )  # fmt: skip
    if scan.formula is None:  # the model's own operations on the longer sequence
        done = rerun(tokens, builder, scan.region, longer)
        new = builder.call(aten.index_select.default, done[node], tokens.token_dim(node), place)
    else:
        new = _WithEarlier(step, builder, node, scan.formula, longer, place).write()
    return new, f"{op_name(node)} at {source_of(node)} is computed from the last {scan.latest} tokens"


def _in_order(step: Step, builder: Builder) -> fx.Node:
    """The numbers of the new tokens."""
    row = step.inputs.rows("row")
    count = builder.call(aten.sym_size.int, row, 0)
    return builder.call(aten.arange.default, count, device=row.meta["val"].device)


class _WithEarlier(ByIndex):
    """Writes a formula that reads values at this token and at earlier ones. `longer`: the sequences with the
    tokens before; `place`: where each token stands in them."""

    def __init__(
        self, step: Step, builder: Builder, node: fx.Node, formula: Expr, longer: dict[fx.Node, fx.Node],
        place: fx.Node,
    ) -> None:  # fmt: skip
        fact = dataclasses.replace(step.tokens[node], formula=_without_beginning(formula, step.tokens))
        super().__init__(builder, step.tokens, node, fact, step.inputs.rows("positions"))
        self.step, self.longer, self.place = step, longer, place
        self.shifted: dict[tuple[fx.Node, int], fx.Node] = {}

    def read(self, node: Expr) -> fx.Node:
        """An element of a table, or of a value at this or an earlier token."""
        if not any(self.step.tokens[node.value].axes):
            return super().read(node)
        value: fx.Node
        dim = self.step.tokens.token_dim(node.value)
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
            made = self.builder.call(aten.index_select.default, self.longer[value], dim, there)
            self.shifted[value, earlier] = made
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
        return all(
            (E.is_const(index, 0) and size_expression(extent) is E.ONE)
            or index is E.var(f"own{place}", self.shape[place])
            or self.fact.axes[place] == (index,)
            for place, (index, extent) in enumerate(zip(indices, value.meta["val"].shape, strict=True))
        )

    def _within(self, value: fx.Node, dim: int, index: Expr) -> Any:
        """An index as a place that there is: beyond the ends, formulas choose something else."""
        if index is self.space.row:
            return 0
        if index is self.space.token:
            return self.at_token(_in_order(self.step, self.builder))
        written = self.value(index)
        if index.op in ("var", "const"):
            return written
        return self.builder.call(aten.clamp.default, written, 0, value.meta["val"].shape[dim] - 1)


def _without_beginning(formula: Expr, tokens: Tokens) -> Expr:
    """The formula without what chooses zero before the first token: a longer sequence has zeros there."""
    token = tokens.space.token

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


def run_again(step: Step, builder: Builder, node: fx.Node, scan: History) -> tuple[fx.Node, str]:
    """A `Rewrite` of values that are computed from all earlier tokens."""
    where = f"{op_name(node)} at {source_of(node)}"
    try:
        new = _run_again(step, builder, node, scan)
    except (NoSize, RuntimeError) as problem:  # torch may not follow the operations for such sizes
        raise NoDecoderError(
            f"{where}: it is computed from all earlier tokens, and what computes it cannot be traced for "
            "sequences of any length."
        ) from problem
    step.anew.append(source_of(node))
    if node in step.tokens.assumed:
        step.assumed.append(f"{where} ({step.tokens.assumed[node]})")
    return new, (
        f"{where} is computed anew from all tokens at every step, because what it does with them is no "
        "attention that is known here"
    )


def _run_again(step: Step, builder: Builder, node: fx.Node, scan: History) -> fx.Node:
    """The node that computes the value for new tokens."""
    inputs, rows, token = step.inputs, step.inputs.rows, step.tokens.token_dim(node)
    whole: dict[fx.Node, fx.Node] = {}
    as_long: fx.Node | None = None
    for operand in scan.operands:
        pages, store = step.kept.pages_of(builder, operand)
        dim = step.tokens.token_dim(operand)
        whole[operand] = builder.call(
            history, pages, operand, inputs.table(store.window), rows("starts"), rows("first"), dim, as_long
        )
        as_long = as_long or builder.call(aten.movedim.int, whole[operand], dim, 0)
    found = rerun(step.tokens, builder, scan.region, whole)[node]

    def picked(found: Any, row: Any, positions: Any) -> Any:
        return found.movedim(token, 1).index([row, positions]).unsqueeze(0).movedim(1, token)

    new = builder.trace(picked, found, rows("row"), rows("positions"))
    # A step has one sequence, and what follows counts it as the model counts its rows.
    count = builder.call(aten.sym_size.int, inputs.ids, 0)
    return builder.call(aten.expand.default, new, [count, *[-1] * (new.meta["val"].ndim - 1)])


def rerun(
    tokens: Tokens, builder: Builder, region: Sequence[fx.Node], given: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The operations of a region on other sequences. `given`: what some of its operands are there, the first
    with its rows and tokens where the original has them."""
    space = tokens.space
    operand, sequence = next(iter(given.items()))
    sizes: dict[Expr, Any] = {
        space.tokens: (sequence, tokens.token_dim(operand)), space.rows: (sequence, tokens.row_dim(operand)),
    }  # fmt: skip
    done: dict[fx.Node, fx.Node] = dict(given)
    values = pytree.tree_leaves([step.meta.get("val") for step in region])
    extents = {size_expression(n) for v in values if isinstance(v, torch.Tensor) for n in v.shape}
    for step in region:
        done[step] = repeated(tokens, builder, step, done, sizes, extents)
        if "attention" in step.meta:
            done[step].meta["attention"] = step.meta["attention"]
    return done
