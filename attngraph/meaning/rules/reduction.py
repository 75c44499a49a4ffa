"""Rules of reductions: sums, means, maxima, and the softmax family in terms of exp and sum."""

from typing import Any

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, axis, part_rule, rule

REDUCTION = Category.REDUCTION


def _open(context: Meaning, source: Any, dims: Any, keepdim: bool, at: Indices) -> tuple[list[Expr], Expr]:
    """The summation variables of a reduction, and the operand's element under them."""
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
    dims, keepdim = argument(node, "dim"), argument(node, "keepdim")
    variables, value = _open(context, node.args[0], dims, keepdim, at)
    for variable in variables:
        value = M.total(variable, value)
    if "mean" in str(node.target):
        value = M.mul(value, *(M.recip(v.args[0]) for v in variables))
    return value


@rule(REDUCTION, "linalg_vector_norm.default")
def vector_norm(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """The sum of sizes (order 1), or the root of the sum of squares (order 2)."""
    order = argument(node, "ord")
    if order not in (1, 2):
        raise Unliftable("a norm of another order than 1 or 2")
    dims, keepdim = argument(node, "dim"), argument(node, "keepdim")
    variables, value = _open(context, node.args[0], dims, keepdim, at)
    value = M.absolute(value) if order == 1 else M.mul(value, value)
    for variable in variables:
        value = M.total(variable, value)
    return value if order == 1 else M.function("sqrt", value)


def _extreme(context: Meaning, source: Any, dims: Any, keepdim: bool, at: Indices, binder: str) -> Expr:
    variables, value = _open(context, source, dims, keepdim, at)
    for variable in variables:
        if variable in value.free:
            value = E.make(binder, (variable, value), None, value.kind)
    return value


@rule(REDUCTION, "amax.default", "amin.default")
def extreme(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    dims, keepdim = argument(node, "dim"), argument(node, "keepdim")
    binder = "amax" if "amax" in str(node.target) else "amin"
    return _extreme(context, node.args[0], dims, keepdim, at, binder)


@rule(REDUCTION, "max.default", "min.default")
def extreme_of_all(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return _extreme(context, node.args[0], [], False, at, "amax" if "max" in str(node.target) else "amin")


@part_rule(REDUCTION, "max.dim", "min.dim")
def extreme_with_place(context: Meaning, node: fx.Node, part: int, at: Indices) -> Expr:
    if part != 0:
        raise Unliftable("the place of a maximum")
    binder = "amax" if "max" in str(node.target) else "amin"
    return _extreme(context, node.args[0], node.args[1], argument(node, "keepdim"), at, binder)


@rule(REDUCTION, "logsumexp.default")
def logsumexp(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    variables, value = _open(context, node.args[0], node.args[1], argument(node, "keepdim"), at)
    value = M.exp(value)
    for variable in variables:
        value = M.total(variable, value)
    return M.log(value)


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
