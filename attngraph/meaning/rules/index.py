"""Rules of tensors that are computed from their index alone: ranges, constants, triangles."""

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, axis, rule

INDEX = Category.INDEX


def _constant(context: Meaning, node: fx.Node, value: object) -> Expr:
    if context.kind(node) == "bool":
        return E.const(bool(value))
    if context.kind(node) == "int" and isinstance(value, float):
        return E.const(int(value))
    return context.scalar(value)


@rule(INDEX, "arange.default", "arange.start", "arange.start_step")
def arange(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    first = context.scalar(node.args[0]) if len(node.args) > 1 else E.ZERO
    step = context.scalar(argument(node, "step", 1))
    return M.add(first, M.mul(at[0], step))


@rule(
    INDEX, "full.default", "full_like.default", "new_full.default", "scalar_tensor.default", "fill.Scalar",
    "fill.Tensor",
)  # fmt: skip
def full(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    name = str(node.target).split(".")[1]
    value = argument(node, {"fill": "value", "scalar_tensor": "s"}.get(name, "fill_value"))
    if isinstance(value, fx.Node) and context.is_tensor(value):
        found = context.read(value, ())
        if context.kind(node) != found.kind:
            raise Unliftable("a fill of another kind than the result")
        return found
    return _constant(context, node, value)


@rule(INDEX, "zeros.default", "zeros_like.default", "new_zeros.default")
def zeros(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return _constant(context, node, 0)


@rule(INDEX, "ones.default", "ones_like.default", "new_ones.default")
def ones(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return _constant(context, node, 1)


@rule(INDEX, "eye.default", "eye.m")
def eye(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return M.where(M.eq(at[0], at[1]), E.ONE, E.ZERO)


@rule(Category.POINTWISE, "tril.default", "triu.default")
def triangle(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    diagonal = context.integer(argument(node, "diagonal"))
    row, column = at[-2:]
    if "tril" in str(node.target):
        kept = M.le(column, M.add(row, diagonal))
    else:
        kept = M.le(M.add(row, diagonal), column)
    value = context.read(node.args[0], at)
    return M.where(kept, value, E.FALSE if value.kind == "bool" else E.ZERO)


@rule(Category.POINTWISE, "cumsum.default")
def cumsum(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """A running sum: of something that does not change along the dimension n + 1 times it; of other values
    only where the context asks for it (`along_tokens`)."""
    dim = axis(argument(node, "dim"), len(at))
    place = E.var("i", context.shape(node)[dim])
    value = context.index_expression(node.args[0], (*at[:dim], place, *at[dim + 1 :]))
    if value is not None and place not in value.free:
        return M.mul(M.number(value), M.add(at[dim], E.ONE))
    if not context.along_tokens:
        raise Unliftable("a running sum of values that differ")
    place = context.fresh(context.shape(node)[dim])
    summand = M.number(context.read(node.args[0], (*at[:dim], place, *at[dim + 1 :])))
    return M.total(place, M.where(M.le(place, at[dim]), summand, E.ZERO))
