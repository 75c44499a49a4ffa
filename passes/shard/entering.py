"""Where a value that all ranks of an axis have enters what they compute differently.

Each rank then has a part of its gradient, and the backward pass adds the parts up: the value enters through
`sum_gradients`, if a gradient may flow to it at all.
"""

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ORIGIN, Axis, ProgramGraph
from attngraph.ir.ops.collectives import SUM_GRADIENTS

LEARNED = ("parameter", "shard", "argument")
"""Kinds of inputs to which gradients may flow."""


class Entering:
    """Values of one graph that enter what the ranks of one axis compute.

    Attributes:
        whole: those that have entered since it was last emptied.
    """

    def __init__(self, graph: ProgramGraph, axis: Axis) -> None:
        self.graph, self.axis = graph, axis
        self.names = dict(zip(graph.placeholders(), graph.inputs, strict=True))
        self.whole: dict[fx.Node, None] = {}
        self._entered: dict[fx.Node, fx.Node] = {}
        self._learns: dict[fx.Node, bool] = {}

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

    def learns(self, node: fx.Node) -> bool:
        """Whether a gradient may flow to the value."""
        if not self.graph.gradients:
            return False
        if node not in self._learns:
            value = node.meta.get("val")
            floating = isinstance(value, tuple) or (isinstance(value, Tensor) and value.is_floating_point())
            given = self.names.get(node)
            if node.op == "placeholder":
                found = given is not None and given.kind in LEARNED
                found |= isinstance(value, Tensor) and value.requires_grad
            elif node.target is torch.ops.aten.detach.default:
                found = False
            else:
                found = any(self.learns(n) for n in node.all_input_nodes)
            self._learns[node] = floating and found
        return self._learns[node]
