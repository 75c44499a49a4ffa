"""How far apart the numbers in some operations can set two tokens.

Operations on places treat tokens alike beyond all their numbers: what they do for more tokens than these add
up to, and than their divisors multiply to, they do for any more. So a trial of what the operations do is of
so many tokens. Every number counts that an operation is given, but dimensions, shapes, and what it does along
a dimension of a fixed extent; fractions only where places or whole numbers are computed with.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from attngraph.ir.graph import argument, is_measured, is_size
from attngraph.ir.language import expr as E
from attngraph.ir.ops import nodes
from attngraph.ir.walk import filled
from attngraph.meaning.algebra.sizes import size_expression

_NO_END = 1 << 31
"""Numbers from this one on mean "to the end"."""
_FEW = 64
"""Known whole numbers in a tensor of so many elements or fewer may be such numbers, too."""
_SHAPES = re.compile(r"(start_|end_)?dim|size|shape|\w+_shape|output_size|(num_)?groups|source|destination")
"""Arguments that say how a tensor is laid out: numbers of dimensions, extents, parts that do not mix."""
_DIVIDED = frozenset({"floor_divide", "remainder", "fmod", "div", "mul", "bitwise_right_shift"})
"""Operations that may bring places together: a quotient by n sets apart what is n times as far."""
_DECIDED = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "isclose", "clamp", "clamp_min", "clamp_max", "hardtanh", "relu",
    "relu6", "maximum", "minimum", "floor", "ceil", "round", "trunc", "sign", "floor_divide", "remainder",
    "fmod", "bitwise_right_shift", "bucketize", "searchsorted",
})  # fmt: skip
"""Operations that do something else from some number on."""
_COMPARISONS = frozenset({"le", "lt", "eq", "ne", "ge", "gt"})
_SLOW = {"sqrt": 2.0, "rsqrt": 2.0, "pow": 2.0} | dict.fromkeys(
    ("log", "log1p", "log2", "log10", "tanh", "sigmoid", "atan", "erf"), math.inf
)
"""Functions of places that grow slowly: what a number after them sets apart is its power, or is not bounded
by it."""


class OfSizes:
    """Whether values of a graph are computed from sizes alone, and so from places; what is known is kept."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, bool] = {}

    def __call__(self, node: fx.Node) -> bool:
        def is_of_sizes(step: fx.Node) -> bool:
            own = step.op != "placeholder" and all(self._known[n] for n in step.all_input_nodes)
            return is_size(step) or own

        return filled(self._known, node, lambda n: n.all_input_nodes, is_of_sizes)


def reach(order: Sequence[fx.Node], values: Mapping[fx.Node, Tensor], is_of_places: OfSizes) -> float:
    """More tokens than this are treated as this many and one more are; infinity where that is not known.

    Args:
        values: tensors that are known when compiling.
        is_of_places: whether a value is computed from sizes and places alone; others are whole numbers of
            the data, or no places.
    """
    added, factor, power = 0.0, 1.0, 1.0
    scale = dict[fx.Node, float]()
    """By how much places are brought together in a value."""
    for node in order:
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        places = node.op == "call_function" and not is_size(node) and is_of_places(node)
        scale[node] = max((scale[n] for n in node.all_input_nodes if n in scale), default=1.0)
        for number in map(abs, _numbers(node, values, places)):
            if number >= _NO_END:
                continue
            if name in _DIVIDED and not is_size(node):
                is_less = name == "mul" and 0 < number < 1
                scale[node] *= 1 / number if is_less else number if name != "mul" and number > 1 else 1
            else:
                added += number
        if name in _DECIDED or (name == "_to_copy" and is_whole(node)):
            factor = max(factor, scale[node])
        if places and name in _SLOW:
            power = max(power, _SLOW[name])
    if power == math.inf:
        return math.inf if any(_compares(n, is_of_places) for n in order) else math.ceil(added * factor)
    return math.ceil(math.pow(added * factor, power) + (factor if factor > 1 else 0))


def _compares(node: fx.Node, is_of_places: OfSizes) -> bool:
    """Whether a node compares numbers that follow from places and are no whole ones."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    operands = [n for n in node.all_input_nodes if not is_size(n)]
    whole = all(map(is_whole, operands))
    return name in ("eq", "ne", "lt", "le", "gt", "ge") and not whole and all(map(is_of_places, operands))


def _numbers(node: fx.Node, values: Mapping[fx.Node, Tensor], places: bool) -> Iterator[float]:
    """The numbers of one operation that may set places apart."""
    known = values.get(node)
    if is_size(node):
        if not is_measured(node):
            formula = size_expression(node.meta["val"])
            yield from (n.value for n in E.walk(formula) if n.op == "const")
    elif known is not None:
        if is_whole(node) and known.numel() <= _FEW:
            yield from known.flatten().tolist()
    elif node.op == "call_function":
        attention = nodes.view(node)
        if attention is not None:
            every = [n for e in attention.program.expressions for n in E.walk(e)]
            asked = {n for c in every if c.op in _COMPARISONS for n in E.walk(c)}
            numbers = (n for n in every if n.op == "const" and (n.kind == "int" or n in asked))
            yield from (float(n.value) for n in numbers if math.isfinite(n.value))
        whole = places or any(map(is_whole, (node, *node.all_input_nodes)))
        schema = getattr(node.target, "_schema", None) if whole or _may_move(node) else None
        names = () if schema is None or attention is not None else [a.name for a in schema.arguments]
        named = (*zip(names, node.args, strict=False), *node.kwargs.items())
        for given in (value for called, value in named if not _SHAPES.match(called)):
            for number in given if isinstance(given, (list, tuple)) else (given,):
                if type(number) is int or (whole and type(number) is float and math.isfinite(number)):
                    yield number


def _may_move(node: fx.Node) -> bool:
    """Whether an operation may move tokens: not along a dimension of a fixed extent."""
    dim, values = argument(node, "dim"), [n.meta.get("val") for n in node.all_input_nodes]
    shape = values[0].shape if values and isinstance(values[0], Tensor) else ()
    return not (isinstance(dim, int) and -len(shape) <= dim < len(shape) and isinstance(shape[dim], int))


def is_whole(node: fx.Node) -> bool:
    """Whether a value is a tensor of whole numbers."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype != torch.bool and not value.is_floating_point()
