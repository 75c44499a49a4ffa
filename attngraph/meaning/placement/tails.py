"""What follows a value of which ranks have parts of the sum: they are added up where it has the fewest bytes.

As long as what follows is linear, the sum over ranks may stand after it: the results of a token's experts,
each times its weight, are one sum. Weights that are added on the way, such as the biases of experts, are then
added by the first rank alone. Linear is what the element rules say, and attention in its values. A cast to a
narrower type is passed if its range is as wide: each rank then rounds its part, as it does wherever a product
in that type is divided.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops import nodes
from attngraph.meaning.check.region import shape_at
from attngraph.meaning.element import Meaning
from attngraph.meaning.placement.elements import element, is_linear
from attngraph.meaning.rule import Category, Unliftable, is_part

aten = torch.ops.aten


class Tails:
    """What follows values of one graph. `of_weights`: whether a value has elements of a parameter alone."""

    def __init__(self, graph: ProgramGraph, meaning: Meaning, of_weights: Callable[[fx.Node], bool]) -> None:
        self.graph, self.meaning, self.of_weights = graph, meaning, of_weights

    def of(self, node: fx.Node) -> list[fx.Node]:
        """The operations after a node up to where ranks are added up; none if that is the node itself. Where
        bytes are equally few, what only moves or scales elements is passed too: another sum may be added
        there."""
        chain, best, fewest, moved = list[fx.Node](), 0, self._bytes(node), True
        while len(node.users) == 1:
            (user,) = node.users
            if not self._keeps_sums(user, node):
                break
            chain.append(user)
            moved &= self.meaning.category(user) is Category.MOVEMENT or _is_scaled(user)
            node, size = user, self._bytes(user)
            if size < fewest or (size == fewest and moved):
                best, fewest, moved = len(chain), size, True
        return chain[:best]

    def _keeps_sums(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether a sum over ranks may be made after `user` instead of before it."""
        if user.op != "call_function":
            return False
        view = nodes.view(user)
        if view is not None:
            return _is_linear_in_values(view, user, node)
        if is_part(user) and nodes.view(node) is not None:
            return bool(user.args[1] == 0)
        if not self._keeps_range(user, node):
            return False
        added = added_to(user, node)
        if added is not None and self.of_weights(added):
            return True
        try:
            _, at = self.meaning.places(user)
            return is_linear(element(self.meaning, user, at), node)
        except Unliftable:
            return False

    def _keeps_range(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether finite parts stay finite in the result's dtype."""
        one, other = (n.meta.get("val") for n in (node, user))
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return False
        if not (one.dtype.is_floating_point and other.dtype.is_floating_point):
            return one.dtype == other.dtype
        widest, found = torch.finfo(one.dtype).max, torch.finfo(other.dtype).max
        return found >= 0.99 * widest

    def _bytes(self, node: fx.Node) -> float:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return math.inf
        return math.prod(shape_at(value, self.graph.hints)) * value.dtype.itemsize


def added_to(node: fx.Node, total: fx.Node) -> fx.Node | None:
    """The tensor that a node adds to `total`, or takes from it; None for another operation."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs or len(node.args) != 2:
        return None
    others: list[Any] = [a for a in node.args if a is not total]
    if len(others) != 1 or not isinstance(getattr(others[0], "meta", {}).get("val"), Tensor):
        return None
    found: fx.Node = others[0]
    return found


def _is_scaled(node: fx.Node) -> bool:
    """Whether a node is a value times a number."""
    return node.target is aten.mul.Tensor and any(isinstance(a, (int, float)) for a in node.args)


def _is_linear_in_values(view: nodes.AttentionOp, user: fx.Node, node: fx.Node) -> bool:
    """Whether `node` is an attention's values and nothing else of it, and its output alone is used."""
    return (
        isinstance(view, nodes.Attention)
        and view.v is node
        and view.k is not node
        and view.q is not node
        and node not in view.reads
        and all(is_part(result) and result.args[1] == 0 for result in user.users)
    )
