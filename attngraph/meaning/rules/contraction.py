"""Rules of contractions: matrix products under all their names, einsum, linear, and torch's own
scaled_dot_product_attention spelled out."""

import math
from typing import Any

from torch import fx

from attngraph.ir.graph.call import argument
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Indices, Unliftable, UnliftableBecause, axis, of_each, rule
from attngraph.meaning.rules.pointwise import dropped
from attngraph.meaning.rules.reduction import zero_where_nan

CONTRACTION = Category.CONTRACTION


def product(context: Meaning, a: Any, b: Any, at: Indices) -> Expr:
    """One element of torch.matmul(a, b), with its rules for vectors and for batch dimensions."""
    shape_a, shape_b = context.shape(a), context.shape(b)
    inner = context.fresh(shape_a[-1])
    rows = (at[-2] if len(shape_b) > 1 else at[-1],) if len(shape_a) > 1 else ()
    columns = (at[-1],) if len(shape_b) > 1 else ()
    batch = at[: len(at) - len(rows) - len(columns)]
    left = context.read_broadcast(a, (*batch, *rows, inner))
    right = context.read_broadcast(b, (*batch, inner, *columns))
    return M.total(inner, M.mul(left, right))


@rule(CONTRACTION, "matmul.default", "bmm.default", "mm.default", "mv.default", "dot.default")
def matmul(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return product(context, node.args[0], node.args[1], at)


@rule(CONTRACTION, "inner.default")
def inner(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """Sums over the last dimension of both; a number multiplies."""
    a, b = node.args[:2]
    last = [-1] if context.shape(a) and context.shape(b) else []
    return _dotted(context, a, b, (last, last), at)


@rule(CONTRACTION, "tensordot.default")
def tensordot(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    return _dotted(context, node.args[0], node.args[1], node.args[2:4], at)


def _dotted(context: Meaning, a: Any, b: Any, over: Any, at: Indices) -> Expr:
    ranks = len(context.shape(a)), len(context.shape(b))
    summed = [[axis(d, rank) for d in dims] for dims, rank in zip(over, ranks, strict=True)]
    places = [context.fresh(context.shape(a)[d]) for d in summed[0]]
    kept = iter(at)
    factors = []
    for tensor, rank, dims in zip((a, b), ranks, summed, strict=True):
        index = tuple(places[dims.index(d)] if d in dims else next(kept) for d in range(rank))
        factors.append(context.read(tensor, index))
    return M.totals(places, M.mul(*factors))


@rule(CONTRACTION, "addmm.default", "baddbmm.default", "addbmm.default", "addmv.default")
def addmm(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    if "addbmm" in str(node.target) and "baddbmm" not in str(node.target):
        raise UnliftableBecause("addbmm sums over the batch")
    alpha, beta = (context.scalar(node.kwargs.get(n, 1)) for n in ("alpha", "beta"))
    value = M.mul(alpha, product(context, node.args[1], node.args[2], at))
    if E.is_const(beta, 0):
        return value
    return M.add(value, M.mul(beta, context.read_broadcast(node.args[0], at)))


@rule(CONTRACTION, "linear.default")
def linear(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    inner = context.fresh(context.shape(node.args[0])[-1])
    weight_at = (at[-1], inner) if len(context.shape(node.args[1])) == 2 else (inner,)
    outer = at[:-1] if len(weight_at) == 2 else at
    product = M.mul(context.read(node.args[0], (*outer, inner)), context.read(node.args[1], weight_at))
    value = M.total(inner, product)
    bias = argument(node, "bias")
    return value if bias is None else M.add(value, context.read_broadcast(bias, at))


@rule(CONTRACTION, "conv1d.default", "conv2d.default", "conv3d.default")
def convolution(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """A sum over channels and over the places of the kernel. One with a kernel of one place is a product with
    its weight; others are followed only where the context asks for it (`along_tokens`)."""
    source, weight = node.args[:2]
    outputs, channels, *kernel = context.shape(weight)
    given = [argument(node, name) for name in ("stride", "padding", "dilation")]
    if any(isinstance(value, str) for value in given):
        raise Unliftable("a convolution padded by name")
    stride, padding, dilation = (of_each(value, len(kernel)) for value in given)
    plain = all(extent is E.ONE for extent in kernel) and set(stride) == {1} and set(padding) == {0}
    if not plain and not context.along_tokens:
        raise Unliftable("a convolution over several places")
    spatial = at[len(at) - len(kernel) :]
    batch, place = at[: len(at) - len(kernel) - 1], at[len(at) - len(kernel) - 1]
    inner = context.fresh(channels)
    steps = [E.ZERO if extent is E.ONE else context.fresh(extent) for extent in kernel]
    group = M.floordiv(place, M.floordiv(outputs, E.const(argument(node, "groups"))))
    places = tuple(
        M.add(M.mul(o, E.const(s)), M.mul(k, E.const(d)), E.const(-p))
        for o, k, s, p, d in zip(spatial, steps, stride, padding, dilation, strict=True)
    )
    element = context.read(source, (*batch, M.add(M.mul(group, channels), inner), *places))
    extents = context.shape(source)[len(at) - len(kernel) :]
    for index, extent, padded in zip(places, extents, padding, strict=True):
        if padded:
            inside = M.and_(M.le(E.ZERO, index), M.lt(index, extent))
            element = M.where(inside, element, E.ZERO)
    product = M.mul(element, context.read(weight, (place, inner, *steps)))
    value = M.totals((inner, *(k for k in steps if k.op == "var")), product)
    bias = argument(node, "bias")
    return value if bias is None else M.add(value, context.read(bias, (place,)))


@rule(CONTRACTION, "einsum.default")
def einsum(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    tensors: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    ranks = [len(context.shape(t)) for t in tensors]
    terms, output = subscripts(str(node.args[0]), ranks)
    extents: dict[str, Expr] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, extent in zip(term, context.shape(tensor), strict=True):
            if E.is_const(extents.setdefault(letter, extent), 1):  # it broadcasts
                extents[letter] = extent
    summed = {letter: context.fresh(extent) for letter, extent in extents.items() if letter not in output}
    places = dict(zip(output, at, strict=True)) | summed
    reads = (context.read(tensor, tuple(map(places.__getitem__, term)))
             for term, tensor in zip(terms, tensors, strict=True))  # fmt: skip
    return M.totals(summed.values(), M.mul(*reads))


def subscripts(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """An einsum equation as names for every dimension of the operands and of the result; the
    dimensions under an ellipsis are named "0", "1", ... from the right."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    named = (len(t.replace("...", "")) for t in terms)
    hidden = [rank - n if "..." in t else 0 for t, n, rank in zip(terms, named, ranks, strict=True)]

    def names(term: str, count: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(str(i) for i in reversed(range(count if dots else 0))), *after]

    if not arrow:
        once = sorted(c for c in set(inputs) if c.isalpha() and inputs.count(c) == 1)
        output = "".join(["..."] * ("..." in inputs) + once)
    return [names(t, n) for t, n in zip(terms, hidden, strict=True)], names(output, max(hidden))


@rule(CONTRACTION, "scaled_dot_product_attention.default")
def scaled_dot_product_attention(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """softmax(scale * q k^T + mask) v, as torch documents it; rows in which all keys are masked give zero."""
    q, k, v = node.args[:3]
    mask, rate = argument(node, "attn_mask"), float(argument(node, "dropout_p"))
    causal, scale = argument(node, "is_causal"), node.kwargs.get("scale")
    grouped = node.kwargs.get("enable_gqa", False)
    width = context.shape(q)[-1]
    if scale is None:
        factor = M.recip(M.function("sqrt", width))
        factor = E.const(1 / math.sqrt(width.value)) if width.op == "const" else factor
    else:
        factor = context.scalar(scale)
    batch, row, column = at[:-2], at[-2], at[-1]

    def heads_of(tensor: Any) -> Indices:
        if not grouped:
            return batch
        group = M.floordiv(context.shape(q)[-3], context.shape(tensor)[-3])
        return (*batch[:-1], M.floordiv(batch[-1], group))

    def score(place: Expr) -> Expr:
        inner = context.fresh(width)
        query = context.read_broadcast(q, (*batch, row, inner))
        key = context.read_broadcast(k, (*heads_of(k), place, inner))
        value = M.mul(factor, M.total(inner, M.mul(query, key)))
        if causal:
            value = M.where(M.le(place, row), value, E.NEG_INF)
        if mask is not None:
            extra = context.read_broadcast(mask, (*batch, row, place))
            if extra.kind == "bool":
                return M.where(extra, value, E.NEG_INF)
            # Unlike an addition in the model, this one passes no gradient to the scores that it hides.
            hidden, shown = _minus_infinity(context.elementwise(extra))
            value = M.where(hidden, E.NEG_INF, M.add(value, shown if hidden is not E.FALSE else extra))
        return value

    extent = context.shape(k)[-2]
    context.require_equal(extent, context.shape(v)[-2])
    place, other = context.fresh(extent), context.fresh(extent)
    weight = M.mul(M.exp(score(place)), M.recip(M.total(other, M.exp(score(other)))))
    weight = zero_where_nan(weight)
    if rate > 0:
        extents = (*context.shape(node)[:-1], extent)
        weight = dropped(node, weight, rate, (*batch, row, place), extents)
    value = context.read_broadcast(v, (*heads_of(v), place, column))
    return M.total(place, M.mul(weight, value))


def _minus_infinity(node: Expr) -> tuple[Expr, Expr]:
    """Where an expression is minus infinity by its own constants, and what it is elsewhere."""
    if node is E.NEG_INF:
        return E.TRUE, E.ZERO
    if node.op == "where":
        pairs = [_minus_infinity(branch) for branch in node.args[1:]]
        return tuple(M.where(node.args[0], a, b) for a, b in zip(*pairs, strict=True))  # type: ignore[return-value]
    if node.op == "add":
        pairs = [_minus_infinity(term) for term in node.args]
        return M.or_(*(h for h, _ in pairs)), M.add(*(s for _, s in pairs))
    return E.FALSE, node


@rule(CONTRACTION, "linalg_solve_triangular.default")
def solve_triangular(context: Meaning, node: fx.Node, at: Indices) -> Expr:
    """By forward substitution, in terms of earlier rows of the solution itself. Only for a row of known
    number, where the context asks for it (`along_tokens`)."""
    *batch, row, column = at
    matrix, sides = node.args[:2]
    given = node.kwargs
    if not context.along_tokens or given["upper"] or not given.get("left", True) or row.op != "const":
        raise Unliftable("a triangular system")
    known = [
        M.mul(
            E.const(-1.0),
            context.read_broadcast(matrix, (*batch, row, E.const(earlier))),
            context.read(node, (*batch, E.const(earlier), column)),
        )
        for earlier in range(int(row.value))
    ]
    value = M.add(context.read_broadcast(sides, (*batch, row, column)), *known)
    if given.get("unitriangular", False):
        return value
    return M.mul(value, M.recip(context.read_broadcast(matrix, (*batch, row, row))))
