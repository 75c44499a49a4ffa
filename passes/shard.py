"""What passes that divide a graph among the ranks of one axis of a mesh have in common.

A graph may be divided along several axes, one pass after the other: the second divides what each rank of the
first computes. A value that all ranks have enters what they compute differently at some place; each rank then
has a part of its gradient, and the backward pass adds the parts up: the value enters through `sum_gradients`,
if a gradient may flow to it at all.
"""

import abc
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ORIGIN, Axis, Level, ProgramGraph, Ranks
from attngraph.ir.kept import kept
from attngraph.ir.ops.collectives import SUM_GRADIENTS
from attngraph.meaning import is_part
from attngraph.meaning.placement.demand import VIEWS
from attngraph.passes.build import Builder, NoSize
from attngraph.passes.canonicalize import forget_operands_of_dtype
from attngraph.pipeline import Outcome

aten = torch.ops.aten
LEARNED = ("parameter", "shard", "argument")
"""Kinds of inputs to which gradients may flow."""
RESIZED = VIEWS | {"aten.expand.default"}
"""Operations that are given the sizes of their result."""
IMPOSSIBLE = (NoSize, RuntimeError, TypeError, ValueError)
"""What is raised where an operation cannot be built on a part of its operands."""


@dataclasses.dataclass(frozen=True)
class Divide(abc.ABC):
    """A pass that divides a graph among `ranks` ranks, whose process group is called `group`.

    `trusts`: bytes of a check above which what the rules derive is taken as it is, and counted in the graph's
    `ranks.unproved`; for plans, whose graphs are never run. None: what cannot be checked is not divided.
    """

    ranks: int = 2
    group: str = ""
    name: str = ""
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED
    trusts: int | None = None

    def run(self, graph: ProgramGraph) -> Outcome:
        """Divide the graph along one more axis."""
        outcome = Outcome()
        if self.ranks > 1:
            axis = Axis(self.ranks, self.group)
            graph.ranks = dataclasses.replace((graph.ranks or Ranks()).along(axis), trusts=self.trusts)
            forget_operands_of_dtype(graph)
            outcome.notes += self.divide(graph, graph.ranks, axis)
        return outcome

    @abc.abstractmethod
    def divide(self, graph: ProgramGraph, ranks: Ranks, axis: Axis) -> list[str]:
        """Divide the graph along an axis, the last of `ranks`; notes for the report."""


class Entering:
    """Values of one graph that enter what the ranks of one axis compute.

    Attributes:
        whole: those that have entered since it was last emptied.
    """

    def __init__(self, graph: ProgramGraph, axis: Axis) -> None:
        self.graph, self.axis = graph, axis
        self.names = graph.given()
        self.whole: dict[fx.Node, None] = {}
        self._entered: dict[fx.Node, fx.Node] = {}

    def enter(self, node: fx.Node) -> fx.Node:
        """A value that every rank has whole, where ranks begin to differ."""
        self.whole[node] = None
        if not self.learns(node):
            return node
        if node not in self._entered or self._entered[node]._erased:
            after = self.graph.placeholders()[-1] if node.op == "placeholder" else node
            with self.graph.graph.inserting_after(after):
                made = self.graph.graph.call_function(SUM_GRADIENTS, (node, self.axis.group))
            made.meta = {k: v for k, v in node.meta.items() if k in (*ORIGIN, "val")}
            self._entered[node] = made
        return self._entered[node]

    @kept
    def learns(self, node: fx.Node) -> bool:
        """Whether a gradient may flow to the value."""
        value = node.meta.get("val")
        floating = isinstance(value, tuple) or (isinstance(value, Tensor) and value.is_floating_point())
        if not self.graph.gradients or not floating or node.target is aten.detach.default:
            return False
        if node.op == "placeholder":
            given = self.names.get(node)
            is_learned = given is not None and given.kind in LEARNED
            return is_learned or (isinstance(value, Tensor) and value.requires_grad)
        return any(self.learns(n) for n in node.all_input_nodes)


def resized(builder: Builder, node: fx.Node, x: fx.Node, sizes: Sequence[Any]) -> fx.Node:
    """One of the `RESIZED` operations, of a part that has these sizes."""
    is_expanded = str(node.target) == "aten.expand.default"
    return builder.call(aten.expand.default if is_expanded else aten.reshape.default, x, sizes)


def on_parts(
    builder: Builder, node: fx.Node, given: Mapping[fx.Node, fx.Node],
    other: Callable[[fx.Node], Any] = lambda operand: operand,
) -> fx.Node:  # fmt: skip
    """A node's operation on what is given in place of its operands, and on `other` of the rest of them."""

    def operand(n: fx.Node) -> Any:
        return given[n] if n in given else other(n)

    source: Any = node.args[0]
    if is_part(node) and source not in given:
        return builder.call(operator.getitem, builder.again(source, operand), node.args[1])
    return builder.again(node, operand)
