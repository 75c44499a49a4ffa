"""Rules of ops that put tensors into or beside others: joins, padding, writes to a slice or a diagonal.

Which tensor an element comes from is a condition on its place.
"""

from typing import Any

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, axis, rule
from attngraph.meaning.rules.movement import END, diagonal_of, slice_start

MOVEMENT = Category.MOVEMENT


@rule(MOVEMENT, "copy.default")
def copy(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The second operand, broadcast, in the first one's shape and dtype."""
    read = context.read_broadcast(node.args[1], at)
    if read.op != "read":
        raise Unliftable("a number copied into a tensor")
    converts = read.value.meta["val"].dtype != node.meta["val"].dtype
    if converts and context.kind(node) != read.kind:
        raise Unliftable("a copy that converts to another kind of number")
    return context.narrowed(read, node.meta["val"].dtype) if converts else read


@rule(MOVEMENT, "slice_scatter.default")
def slice_scatter(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The second operand where the slice is, the first elsewhere."""
    whole, part = node.args[:2]
    dim = axis(argument(node, "dim"), len(at))
    extent, count = context.shape(whole)[dim], context.shape(part)[dim]
    end, step = argument(node, "end"), context.integer(argument(node, "step"))
    to_the_end = step is E.ONE and (end is None or end == END)
    first = M.sub(extent, count) if to_the_end else slice_start(context, node, extent)
    place = M.sub(at[dim], first)
    inside = M.and_(M.le(E.ZERO, place), M.lt(place, M.mul(count, step)))
    if step is not E.ONE:
        inside = M.and_(inside, M.eq(M.mod(place, step), E.ZERO))
    inner = context.read(part, (*at[:dim], M.floordiv(place, step), *at[dim + 1 :]))
    return M.where(inside, inner, context.read(whole, at))


@rule(MOVEMENT, "select_scatter.default")
def select_scatter(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The second operand at one place of a dimension, the first elsewhere."""
    whole, part = node.args[:2]
    dim = axis(argument(node, "dim"), len(at))
    place = context.integer(argument(node, "index"))
    if place.op == "const" and place.value < 0:
        place = M.add(place, context.shape(whole)[dim])
    inner = context.read(part, (*at[:dim], *at[dim + 1 :]))
    return M.where(M.eq(at[dim], place), inner, context.read(whole, at))


@rule(MOVEMENT, "diagonal_scatter.default")
def diagonal_scatter(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The second operand on a diagonal of two dimensions, the first elsewhere."""
    rows, columns, offset = diagonal_of(node, len(at))
    others = tuple(place for dim, place in enumerate(at) if dim not in (rows, columns))
    place = M.sub(at[rows], E.const(max(0, -offset)))
    on_it = M.eq(at[columns], M.add(at[rows], E.const(offset)))
    return M.where(on_it, context.read(node.args[1], (*others, place)), context.read(node.args[0], at))


@rule(MOVEMENT, "diag_embed.default")
def diag_embed(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """A vector on a diagonal of two dimensions, zero elsewhere."""
    rows, columns, offset = diagonal_of(node, len(at))
    others = tuple(place for dim, place in enumerate(at) if dim not in (rows, columns))
    place = M.sub(at[rows], E.const(max(0, -offset)))
    on_it = M.eq(at[columns], M.add(at[rows], E.const(offset)))
    element = context.read(node.args[0], (*others, place))
    return M.where(on_it, element, E.FALSE if element.kind == "bool" else E.ZERO)


@rule(MOVEMENT, "cat.default", "concat.default")
def cat(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    tensors: Any = node.args[0]
    dim = axis(argument(node, "dim"), len(at))
    pieces: list[tuple[Expr, Expr]] = []
    first: Expr = E.ZERO
    for tensor in tensors:
        shape = context.shape(tensor)
        if len(shape) == 1 and E.is_const(shape[0], 0):
            continue
        place = M.sub(at[dim], first)
        first = M.add(first, shape[dim])
        pieces.append((M.lt(at[dim], first), context.read(tensor, (*at[:dim], place, *at[dim + 1 :]))))
    value = pieces[-1][1]
    for condition, piece in reversed(pieces[:-1]):
        value = M.where(condition, piece, value)
    return value


@rule(MOVEMENT, "stack.default")
def stack(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    tensors: Any = node.args[0]
    dim = axis(argument(node, "dim"), len(at))
    rest = (*at[:dim], *at[dim + 1 :])
    value = context.read(tensors[-1], rest)
    for place in range(len(tensors) - 2, -1, -1):
        value = M.where(M.eq(at[dim], E.const(place)), context.read(tensors[place], rest), value)
    return value


@rule(MOVEMENT, "constant_pad_nd.default", "pad.default")
def pad(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    if str(node.target) == "aten.pad.default" and argument(node, "mode") != "constant":
        raise Unliftable("padding other than by a constant")
    value = argument(node, "value") or 0
    widths: Any = node.args[1]
    shape = context.shape(node.args[0])
    places, inside = list(at), E.TRUE
    for pair in range(len(widths) // 2):
        dim = len(at) - 1 - pair
        places[dim] = M.sub(at[dim], context.integer(widths[2 * pair]))
        inside = M.and_(inside, M.le(E.ZERO, places[dim]), M.lt(places[dim], shape[dim]))
    return M.where(inside, context.read(node.args[0], tuple(places)), E.const(value))
