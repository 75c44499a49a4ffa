"""Elements of the operations that recognition of attention has no use for, as far as placement needs them.

By the element rules; beyond them, pointwise operations, products of tokens with the weights of the expert
that each goes to (mixtures of experts), losses of single entries, and which leading dimensions of other
operations are independent of each other (norms, complex views).
"""

import dataclasses
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable

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
        return _grouped(meaning, told, at)
    if str(node.target) == "aten.cross_entropy_loss.default":
        return _loss(meaning, node, at)
    try:
        return meaning.element(node, at)
    except Unliftable:
        if not _is_pointwise(node):
            raise
    tensors = [n for n in node.all_input_nodes if meaning.is_tensor(n)]
    return E.make("raw", tuple(meaning.read_broadcast(n, at) for n in tensors), "pointwise")


def _is_pointwise(node: fx.Node) -> bool:
    """Whether elements are computed from those at the same place; to detach a value changes no element."""
    detached = str(node.target) == "aten.detach.default"
    return detached or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _grouped(meaning: Meaning, told: Grouped, at: Indices) -> Expr:
    """Which expert a token goes to follows from where the experts' tokens end, and is not looked into."""
    inner = meaning.fresh(meaning.shape(told.x)[1])
    expert = E.make("raw", (at[0], meaning.read(told.ends, (E.ZERO,))), "group", "int")
    factors = meaning.read(told.x, (at[0], inner)), E.read(told.weight, (expert, inner, at[1]), "float")
    return M.total(inner, M.mul(*factors))


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
