"""Rules of windows that slide over dimensions: pooling, and the windows themselves."""

from typing import Any

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, axis, of_each, rule

REDUCTION, MOVEMENT = Category.REDUCTION, Category.MOVEMENT


@rule(REDUCTION, "max_pool1d.default", "max_pool2d.default", "max_pool3d.default")
def largest(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The largest element of a window; there is none beyond the ends."""
    dilation, ceil = argument(node, "dilation"), argument(node, "ceil_mode")
    places, element, inside = _window(context, node, at, dilation, ceil)
    value = M.where(inside, element, E.NEG_INF)
    for place in places:
        value = E.make("amax", (place, value), None, "float")
    return value


@rule(REDUCTION, "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def mean(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The mean of a window. Zeros beyond the ends count as elements, or there are none."""
    ceil, divisor = argument(node, "ceil_mode"), argument(node, "divisor_override")
    counts_zeros = argument(node, "count_include_pad")
    if counts_zeros and ceil and divisor is None:
        raise Unliftable("a mean of a window that ends beyond the padding")
    places, element, inside = _window(context, node, at, 1, ceil)
    value: Expr = M.where(inside, element, E.ZERO)
    number: Expr = E.ONE if counts_zeros else M.where(inside, E.ONE, E.ZERO)
    for place in places:
        value, number = M.total(place, value), M.total(place, number)
    return M.mul(value, M.recip(number if divisor is None else E.const(divisor)))


@rule(MOVEMENT, "unfold.default")
def unfold(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """Windows of one dimension; the place in a window is the last index."""
    dim, step = axis(argument(node, "dimension"), len(at) - 1), argument(node, "step")
    place = M.add(M.mul(at[dim], context.integer(step)), at[-1])
    return context.read(node.args[0], (*at[:dim], place, *at[dim + 1 : -1]))


def _window(
    context: Meaning, node: fx.Node, at: Indices, dilation: Any, ceil: bool
) -> tuple[list[Expr], Expr, Expr]:
    """Variables for the places of a window, the element there, and whether it is one of the operand's."""
    dims = int(str(node.target).partition("pool")[2][0])
    sizes = of_each(node.args[1], dims)
    strides = of_each(argument(node, "stride") or sizes, dims)
    padding, dilations = of_each(argument(node, "padding"), dims), of_each(dilation, dims)
    places = [context.fresh(E.const(size)) if size > 1 else E.ZERO for size in sizes]
    indices = tuple(
        M.add(M.mul(o, E.const(s)), M.mul(k, E.const(d)), E.const(-p))
        for o, k, s, d, p in zip(at[-dims:], places, strides, dilations, padding, strict=True)
    )
    element = M.number(context.read(node.args[0], (*at[:-dims], *indices)))
    within: Expr = E.TRUE
    if ceil or any(padding):
        extents = zip(indices, context.shape(node.args[0])[-dims:], strict=True)
        within = M.and_(*(M.and_(M.le(E.ZERO, index), M.lt(index, extent)) for index, extent in extents))
    return [p for p in places if p.op == "var"], element, within
