"""The part of a graph between some values and what they are computed from."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import is_size, makes_a_size, measured_sizes
from attngraph.ir.language import Expr
from attngraph.ir.ops import nodes
from attngraph.ir.walk import operands_first
from attngraph.meaning.algebra.sizes import evaluate_size, size_expression


def region(targets: Iterable[fx.Node], leaves: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes needed to compute `targets` from `leaves`, operands first, in an order that depends on
    the computation alone (not on where its nodes stand in the graph). Sizes are not followed, except those
    that only data know, to the node that makes them, where no leaf has them."""
    stop = set(leaves)
    known = {size for leaf in stop for size in measured_sizes(leaf)}

    def operands(node: fx.Node) -> Sequence[fx.Node]:
        ends = node in stop or (is_size(node) and measured_sizes(node) <= known)
        return () if ends else node.all_input_nodes

    return operands_first(targets, operands)


def with_makers_of_sizes(targets: Sequence[fx.Node], leaves: Sequence[fx.Node]) -> list[fx.Node]:
    """The leaves, and what makes sizes of data between them and the targets. What begins with all of these
    has a number for each such size, as for any other, and holds whatever data make it."""
    return list(dict.fromkeys([*leaves, *filter(makes_a_size, region(targets, leaves))]))


class _Place(int):
    """A node's place in a region; prints as a number."""


def fingerprint(order: Sequence[fx.Node], given: Mapping[fx.Node, Any]) -> Any:
    """A region as text in which nodes are numbered: equal for equal layers.

    Args:
        given: what is known of the values that the region begins with, besides dtype and shape.
    """
    number = {node: _Place(place) for place, node in enumerate(order)}
    lines: list[Any] = []
    for node in order:
        about = _about(node.meta.get("val"))
        if node in given:
            lines.append((about, given[node]))
        else:
            shown = fx.map_arg((node.args, node.kwargs), lambda n: number.get(n, _Place(-1)))
            lines.append((str(node.target), repr(shown), about))
    return tuple(lines)


def _about(value: Any) -> Any:
    """The dtype and sizes of a value, or of several, as numbers and formulas: printing them takes long."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(n if isinstance(n, int) else n.node.expr for n in value.shape)
    return tuple(map(_about, value)) if isinstance(value, (list, tuple)) else str(value)


def bytes_in_float64(order: Sequence[fx.Node], sizes: Mapping[str, int]) -> int:
    """The bytes of all values of a region together, scores of attentions included, in float64."""
    values = (node.meta.get("val") for node in order)
    found = sum(torch.Size(shape_at(v, sizes)).numel() for v in values if isinstance(v, Tensor))
    return 8 * (found + sum(scores_of(node, sizes) for node in order))


def scores_of(node: fx.Node, sizes: Mapping[str, int]) -> int:
    """How many scores a node computes that is an attention over whole sequences."""
    found = nodes.whole(node)
    if found is None:
        return 0
    q, k = (shape_at(n.meta["val"], sizes) for n in (found.q, found.keys[0]))
    return q[0] * q[1] * q[2] * k[-2]


def shape_at(value: Tensor, sizes: Mapping[str, int]) -> list[int]:
    """The shape of a traced tensor where its symbolic sizes are these numbers."""
    return [evaluate_size(size_expression(s), sizes) for s in value.shape]


def numbers_at(extents: Iterable[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Formulas of sizes, numbers, or nodes of these there."""
    values = (e.meta["val"] if isinstance(e, fx.Node) else e for e in extents)
    found = (v if isinstance(v, Expr) else size_expression(v) for v in values)
    return tuple(evaluate_size(extent, sizes) for extent in found)


def bytes_at(value: Tensor, sizes: Mapping[str, int]) -> int:
    """The bytes of a traced tensor there."""
    return math.prod(shape_at(value, sizes)) * value.dtype.itemsize
