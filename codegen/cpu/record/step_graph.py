"""A decoder's graph as recordings of its steps see it: which inputs change in what way, and which operations
may be compiled calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.codegen.cpu.record.copies import may_be_copy
from attngraph.ir.graph.program_graph import ProgramGraph, Rate
from attngraph.ir.ops import nodes
from attngraph.ir.ops.last_tokens import last_tokens
from attngraph.ir.ops.loop import loop
from attngraph.ir.ops.running_sum import running_sum

_CHANGING = ("argument", "rows", "carried")
"""Kinds of inputs that are copied at every call, but for carried values that compiled code alone reads; all
others are read where they lie."""
SEVERAL = (torch.ops.attngraph.token_program.default, running_sum, loop)
"""Ops with several results."""


class Kinds:
    """A decoder's graph, and which of its inputs change in what way, by number.

    Attributes:
        changing: new at every call.
        pages: of the cache, which may move.
        fixed: computed once for a prompt.
        still: weights and all others, which lie where they lay.
        tokens: the tokens of a call.
        shorten: makes a module cheaper to call.
    """

    def __init__(self, graph: ProgramGraph, shorten: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
        self.graph, self.shorten = graph, shorten
        placeholders = graph.placeholders()
        self.changing = [n for n, given in enumerate(graph.inputs) if given.kind in _CHANGING]
        self.pages = [n for n, given in enumerate(graph.inputs) if given.kind == "pages"]
        self.fixed = [n for n, given in enumerate(graph.inputs) if given.kind == Rate.PROMPT.value]
        moving = {*self.changing, *self.pages}
        self.still = [n for n in range(len(graph.inputs)) if n not in moving]
        arguments = (n for n in self.changing if graph.inputs[n].kind == "argument")
        self.tokens = next((n for n in arguments if _rank(placeholders[n]) > 1), None)


def early_first(graph: fx.Graph) -> list[fx.Node]:
    """The operations, first those that need none of what compiled code computes: chains are then not cut for
    them."""
    late: set[fx.Node] = set()
    order: tuple[list[fx.Node], list[fx.Node]] = [], []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _may_be_compiled(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        order[node in late].append(node)
    return [*order[0], *order[1]]


def _may_be_compiled(node: fx.Node) -> bool:
    if node.target in SEVERAL or node.target is last_tokens or may_be_copy(node):
        return True
    return isinstance(nodes.view(node), nodes.CachedAttention)


def only_moves(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" or bool(getattr(node.target, "is_view", False))


def is_view(value: Any, args: Any) -> bool:
    """Whether a value shares memory with an operand, so that it follows what is written there."""
    if isinstance(value, (list, tuple)):
        return False
    storages = {
        t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)
    }
    return value.untyped_storage().data_ptr() in storages


def _rank(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, Tensor) else 0
