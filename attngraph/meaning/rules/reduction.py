"""Rules of reductions: sums, means, maxima, the softmax family in terms of exp and sum, and windows that
slide over dimensions. An element of a collective's result is computed from the ranks' elements at one place
and from no other, so tokens that are apart before are apart afterwards; how it is computed is not looked
into.
"""

from typing import Any

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.ir.ops.collectives import ALL_GATHER, ALL_REDUCE, SUM_GRADIENTS
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import RULES, Category, Indices, Rule, Unliftable, axis, of_each, part_rule, rule

REDUCTION, MOVEMENT = Category.REDUCTION, Category.MOVEMENT


def _open(context: Meaning, node: fx.Node, at: Indices) -> tuple[list[Expr], Expr]:
    """The summation variables of a reduction, and the operand's element under them."""
    source, dims, keepdim = node.args[0], argument(node, "dim"), argument(node, "keepdim")
    shape = context.shape(source)
    rank = len(shape)
    if dims is None or dims == []:
        chosen = list(range(rank))
    else:
        chosen = [axis(d, rank) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    outer = iter(at)
    variables, places = [], []
    for d in range(rank):
        if d in chosen:
            variables.append(context.fresh(shape[d]))
            places.append(variables[-1])
            if keepdim:
                next(outer)
        else:
            places.append(next(outer))
    return variables, M.number(context.read(source, tuple(places)))


@rule(REDUCTION, "sum.default", "sum.dim_IntList", "mean.default", "mean.dim")
def total(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    variables, value = _open(context, node, at)
    value = M.totals(variables, value)
    if "mean" in str(node.target):
        value = M.mul(value, *(M.recip(v.args[0]) for v in variables))
    return value


@rule(REDUCTION, "linalg_vector_norm.default")
def vector_norm(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The sum of sizes (order 1), or the root of the sum of squares (order 2)."""
    order = argument(node, "ord")
    if order not in (1, 2):
        raise Unliftable("a norm of another order than 1 or 2")
    variables, value = _open(context, node, at)
    value = M.totals(variables, M.absolute(value) if order == 1 else M.mul(value, value))
    return value if order == 1 else M.function("sqrt", value)


@rule(REDUCTION, "amax.default", "amin.default", "max.default", "min.default")
def extreme(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    variables, value = _open(context, node, at)
    for variable in variables:
        if variable in value.free:
            binder = "amax" if "max" in str(node.target) else "amin"
            value = E.make(binder, (variable, value), None, value.kind)
    return value


@part_rule(REDUCTION, "max.dim", "min.dim")
def extreme_with_place(context: Meaning, node: fx.Node, part: int, at: Indices) -> Expr:
    if part != 0:
        raise Unliftable("the place of a maximum")
    return extreme(context, node, at)


@rule(REDUCTION, "logsumexp.default")
def logsumexp(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    variables, value = _open(context, node, at)
    return M.log(M.totals(variables, M.exp(value)))


SOFTMAX = ("softmax.int", "_softmax.default", "special_softmax.int", "_safe_softmax.default")
LOG_SOFTMAX = ("log_softmax.int", "_log_softmax.default", "special_log_softmax.int")


@rule(REDUCTION, *SOFTMAX, *LOG_SOFTMAX)
def softmax(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """exp(a) / sum of exp(a) along one dimension (Bridle, 1990), or its logarithm."""
    dim = axis(int(node.args[1]), len(at))  # type: ignore[arg-type]
    if "log_softmax" in str(node.target):
        return M.sub(_score(context, node, at), M.log(normaliser(context, node, dim, at)))
    weight = M.mul(M.exp(_score(context, node, at)), M.recip(normaliser(context, node, dim, at)))
    if "_safe_softmax" in str(node.target):
        return zero_where_nan(weight)
    return weight


def _score(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """What is exponentiated: the operand in the dtype of the result."""
    return M.number(context.narrowed(context.read(node.args[0], at), node.meta["val"].dtype))


def normaliser(context: Meaning, node: fx.Node, dim: int, at: Indices) -> Expr:
    place = context.fresh(context.shape(node.args[0])[dim])
    return M.total(place, M.exp(_score(context, node, (*at[:dim], place, *at[dim + 1 :]))))


def zero_where_nan(weight: Expr) -> Expr:
    """A softmax that gives zeros, not NaN, where every score is minus infinity."""
    return M.where(E.make("isnan", (weight,), None, "bool"), E.const(0.0), weight)


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


def summed(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """A sum over ranks, or a value whose gradients are summed over ranks."""
    return M.raw("over ranks", context.read(node.args[0], at))


def gathered(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The ranks' values side by side."""
    args: Any = node.args
    x, dim = args[0], args[1]
    extent = context.shape(x)[dim]
    own = tuple(M.mod(index, extent) if d == dim else index for d, index in enumerate(at))
    return M.raw("of a rank", context.read(x, own), M.floordiv(at[dim], extent))


for _op in (ALL_REDUCE, SUM_GRADIENTS):
    RULES[str(_op)] = Rule(Category.REDUCTION, summed)
RULES[str(ALL_GATHER)] = Rule(Category.REDUCTION, gathered)
