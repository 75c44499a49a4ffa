"""Which values data may make as low as the numbers that hide: by a large number; or where data choose a
number (by a flag that is computed with), and a function of it is far below zero, as the logarithm of zero.
Others of what layers, norms and softmaxes give are taken not to be so low, as scores are."""

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from attngraph.ir.graph import op_name
from attngraph.ir.walk import reached
from attngraph.meaning.masks.fold import CHOOSES, HIDES, STEEP_OPS
from attngraph.meaning.tokens.facts import Facts, Kind

_MOVES = frozenset({
    "_to_copy", "clone", "index", "gather", "index_select", "take_along_dim", "cat", "stack", "embedding",
    "scatter",
})  # fmt: skip
_WITH_NUMBERS = frozenset({"full", "full_like", "new_full", "scalar_tensor", "masked_fill", "scatter"})
_MAKES = _WITH_NUMBERS | {"where", "mul", "add", "sub"}


def may_be_low(facts: Facts, node: fx.Node) -> bool:
    """Whether data may make an element of a value as low as a fill."""
    return any(_lowers(facts, n) for n in _elementwise(facts, node))


def is_chosen(facts: Facts, node: fx.Node) -> bool:
    """Whether data choose among numbers for an element of a value, as a flag that is computed with does."""
    return any(op_name(n) in CHOOSES or any(_is_flag(facts, a) for a in n.all_input_nodes)
               for n in _elementwise(facts, node))  # fmt: skip


def _elementwise(facts: Facts, node: fx.Node) -> Iterator[fx.Node]:
    """The operations that compute a value from what layers give, element by element."""

    def operands(n: fx.Node) -> list[fx.Node]:
        return [a for a in n.all_input_nodes if not _is_fixed(facts, a)] if _keeps_low(n) else []

    return filter(_keeps_low, reached([node], operands))


def _is_fixed(facts: Facts, node: fx.Node) -> bool:
    return node not in facts or facts[node].kind is Kind.FIXED


def _is_flag(facts: Facts, node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.bool and not _is_fixed(facts, node)


def _keeps_low(node: fx.Node) -> bool:
    """Whether a low result may be one that it is given, or made of numbers that stand in the call."""
    value, target = node.meta.get("val"), node.target
    if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    is_view = isinstance(target, torch._ops.OpOverload) and target.is_view
    return op_name(node) in _MOVES or is_view or _is_pointwise(node)


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _lowers(facts: Facts, node: fx.Node) -> bool:
    operands = node.all_input_nodes
    if op_name(node) in STEEP_OPS and not _is_fixed(facts, operands[-1]):
        return is_chosen(facts, operands[-1])
    fixed = (a for a in operands if _is_fixed(facts, a))
    return any(map(_is_large, _scalars(node))) or any(_has_large(facts, a) for a in fixed)


def _has_large(facts: Facts, fixed: fx.Node) -> bool:
    """Whether a value that no token changes has large numbers, as far as they are known."""
    for node in reached(
        [fixed], lambda n: n.all_input_nodes if op_name(n) in _MAKES or _keeps_low(n) else ()
    ):
        known = facts.meaning.values.get(node)
        if known is not None and known.is_floating_point() and known.numel():
            if float(known.abs().max()) >= HIDES:
                return True
        elif op_name(node) in _MAKES and any(map(_is_large, _scalars(node))):
            return True
    return False


def _scalars(node: fx.Node) -> Iterator[float]:
    """The numbers among what an operation computes with; what others are given are places and sizes."""
    given = (
        (*node.args, *node.kwargs.values()) if _is_pointwise(node) or op_name(node) in _WITH_NUMBERS else ()
    )
    return (float(a) for a in given if isinstance(a, (int, float)))


def _is_large(number: float) -> bool:
    return abs(number) >= HIDES
