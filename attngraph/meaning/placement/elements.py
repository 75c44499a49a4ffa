"""Elements of the operations that recognition of attention has no use for, as far as placement needs them.

By the element rules; beyond them, pointwise operations, products of tokens with the weights of the expert
that each goes to (mixtures of experts), losses of single entries, and which leading dimensions of other
operations are independent of each other (norms, complex views).

What follows a value of which ranks have parts of the sum is linear as far as these rules say it, and
attention in its values. So long, the sum over ranks may stand after it, where it has the fewest bytes: the
results of a token's experts, each times its weight, are one sum. Weights that are added on the way, such as
the biases of experts, are then added by the first rank alone. A cast to a narrower type is passed if its
range is as wide: each rank then rounds its part, as it does wherever a product in that type is divided.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ProgramGraph, argument
from attngraph.ir.language import E, Expr
from attngraph.ir.ops import nodes
from attngraph.meaning.algebra import M
from attngraph.meaning.check.region import bytes_at
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, is_part, tried

GROUPED = frozenset({"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"})
"""Products `x[t] @ weight[expert of t]` of tokens that are sorted by expert."""


@dataclasses.dataclass(frozen=True)
class Grouped:
    """The operands of such a product: `ends` says where each expert's tokens end."""

    x: fx.Node
    weight: fx.Node
    ends: fx.Node


def grouped(node: fx.Node) -> Grouped | None:
    """A product of tokens with the weights of their experts, if a node is one."""
    if str(node.target) not in GROUPED or node.kwargs.get("bias") is not None:
        return None
    operands: list[Any] = [*node.args, *(node.kwargs[k] for k in ("offs",) if k in node.kwargs)]
    if len(operands) < 3 or not all(isinstance(n, fx.Node) for n in operands[:3]):
        return None
    found = Grouped(*operands[:3])
    return found if (found.x.meta["val"].ndim, found.weight.meta["val"].ndim) == (2, 3) else None


def category(meaning: Meaning, node: fx.Node) -> Category | None:
    """The category of a node's operation."""
    return Category.CONTRACTION if grouped(node) is not None else meaning.category(node)


def element(meaning: Meaning, node: fx.Node, at: Indices) -> Expr:
    """One element of a node, in terms of elements of its operands.

    Raises:
        Unliftable: nothing is known of it.
    """
    told = grouped(node)
    if told is not None:
        # Which expert a token goes to follows from where the experts' tokens end, and is not looked into.
        inner = meaning.fresh(meaning.shape(told.x)[1])
        expert = E.make("raw", (at[0], meaning.read(told.ends, (E.ZERO,))), "group", "int")
        weight = E.read(told.weight, (expert, inner, at[1]), "float")
        return M.total(inner, M.mul(meaning.read(told.x, (at[0], inner)), weight))
    if str(node.target) == "aten.cross_entropy_loss.default":
        return _loss(meaning, node, at)
    try:
        return meaning.element(node, at)
    except Unliftable:
        # To detach a value changes no element.
        detached = str(node.target) == "aten.detach.default"
        if not detached and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            raise
    tensors = [n for n in node.all_input_nodes if meaning.is_tensor(n)]
    return E.make("raw", tuple(meaning.read_broadcast(n, at) for n in tensors), "pointwise")


def any_element(meaning: Meaning, node: fx.Node) -> Expr | None:
    """Any one element of a node, in terms of elements of its operands; None where nothing is known of it."""
    return tried(lambda: element(meaning, node, meaning.places(node)[1]))


def _loss(meaning: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The loss of one entry, from its logits and the number (or the probabilities) of its class."""
    logits, target = node.args[:2]
    shape = meaning.shape(logits)
    if len(shape) != len(at) + 1 or argument(node, "reduction") != 0:
        raise Unliftable("a loss of several entries")
    classes = meaning.fresh(shape[min(1, len(at))])
    every = (*at[:1], classes, *at[1:])
    of_classes = len(meaning.shape(target)) == len(every)
    reads = [meaning.read(logits, every), meaning.read(target, every if of_classes else at)]
    weight = argument(node, "weight")
    reads += [] if weight is None else [meaning.read(weight, (classes,))]
    return E.make("raw", tuple(reads), "loss")


def independent_dims(node: fx.Node) -> int | None:
    """How many leading dimensions of a result are those of its first operand, whose entries along them do not
    mix; None where nothing is known. (Other operands are the same for all of them.)"""
    rank = node.meta["val"].ndim if isinstance(node.meta.get("val"), torch.Tensor) else 0
    match str(node.target):
        case "aten.layer_norm.default" | "aten.rms_norm.default":
            sizes: Any = node.args[1]
            return rank - len(sizes)
        case "aten.view_as_complex.default":
            return rank
        case "aten.view_as_real.default":
            return rank - 1
    return None


def attention_of(node: fx.Node) -> fx.Node | None:
    """The attention of which a node is the result, or one of the results; None for another node."""
    source: Any = node.args[0] if is_part(node) else node
    return source if nodes.view(source) is not None else None


def is_linear(value: Expr, node: fx.Node) -> bool:
    """Whether an element is a sum of elements of a node, each times what does not depend on the node."""
    if value.op == "read" and value.value is node:
        return not any(_reads(i, node) for i in value.args)
    if value.op == "sum":
        return is_linear(value.args[1], node)
    if value.op == "mul":
        inside = [f for f in value.args if _reads(f, node)]
        return len(inside) == 1 and is_linear(inside[0], node)
    return False


def _reads(value: Expr, node: fx.Node) -> bool:
    return any(n.op == "read" and n.value is node for n in E.walk(value))


aten = torch.ops.aten


class Tails:
    """What follows values of one graph. `of_weights`: whether a value has elements of a parameter alone."""

    def __init__(self, graph: ProgramGraph, meaning: Meaning, of_weights: Callable[[fx.Node], bool]) -> None:
        self.graph, self.meaning, self.of_weights = graph, meaning, of_weights

    def of(self, node: fx.Node) -> list[fx.Node]:
        """The operations after a node up to where ranks are added up; none if that is the node itself. Where
        bytes are equally few, what only moves or scales elements is passed too: another sum may be added
        there."""
        chain, best, fewest, moved = list[fx.Node](), 0, bytes_at(node.meta["val"], self.graph.hints), True
        while len(node.users) == 1:
            (user,) = node.users
            if not self._keeps_sums(user, node):
                break
            chain.append(user)
            by_number = any(isinstance(a, (int, float)) for a in user.args)
            is_scaled = user.target is aten.mul.Tensor and by_number
            moved &= self.meaning.category(user) is Category.MOVEMENT or is_scaled
            value = user.meta["val"]
            node, size = user, bytes_at(value, self.graph.hints) if isinstance(value, Tensor) else fewest + 1
            if size < fewest or (size == fewest and moved):
                best, fewest, moved = len(chain), size, True
        return chain[:best]

    def _keeps_sums(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether a sum over ranks may be made after `user` instead of before it."""
        if user.op != "call_function":
            return False
        view = nodes.view(user)
        if view is not None:  # if it is the values and nothing else, and the output alone is used
            others = (view.k, view.q, *view.reads) if isinstance(view, nodes.Attention) else (node,)
            only_out = all(is_part(result) and result.args[1] == 0 for result in user.users)
            return node not in others and only_out
        if is_part(user) and nodes.view(node) is not None:
            return bool(user.args[1] == 0)
        if not self._keeps_range(user, node):
            return False
        added = added_to(user, node)
        if added is not None and self.of_weights(added):
            return True
        value = any_element(self.meaning, user)
        return value is not None and is_linear(value, node)

    def _keeps_range(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether finite parts stay finite in the result's dtype."""
        one, other = (n.meta.get("val") for n in (node, user))
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return False
        if not (one.dtype.is_floating_point and other.dtype.is_floating_point):
            return one.dtype == other.dtype
        return torch.finfo(other.dtype).max >= 0.99 * torch.finfo(one.dtype).max


def added_to(node: fx.Node, total: fx.Node) -> fx.Node | None:
    """The tensor that a node adds to `total`, or takes from it; None for another operation."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs or len(node.args) != 2:
        return None
    others: list[Any] = [a for a in node.args if a is not total]
    if len(others) != 1 or not isinstance(getattr(others[0], "meta", {}).get("val"), Tensor):
        return None
    found: fx.Node = others[0]
    return found
