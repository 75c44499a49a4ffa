"""Multiplying weights in advance: two consecutive projections become one stored matrix. Used by `absorb_mla`.

A query is projected by W_q and then, to attend to latents, by W_uk; a weighted sum of latents is projected by
W_uv and then by the output projection: two matrices each. Their products
W_q W_uk^T and W_uv W_o depend on weights alone, so they move to the stage that runs when a weight changes.
The products are larger than their factors where the inner width is small; the report says by how much.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from attngraph.ir.graph.source import source_of
from attngraph.ir.language import E, Expr
from attngraph.meaning import Category, M, Meaning, Unliftable, recombined, split_digits
from attngraph.meaning.algebra.sums import SumOfProducts, sum_of_products
from attngraph.meaning.attention import layout
from attngraph.meaning.attention.latent import find_projection
from attngraph.passes.build import Builder, Refused

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Folded:
    """`value` replaces the result of two matrices; `products` are computed from weights alone. `before` and
    `after` count the parameters of the two and of their product; `sources` is what the value is computed
    from, `width` the width of the outer side."""

    value: fx.Node
    products: tuple[fx.Node, ...]
    before: int
    after: int
    sources: tuple[fx.Node, ...]
    width: int


def fold_query(builder: Builder, meaning: Meaning, q: fx.Node, key_up: fx.Node) -> Folded:
    """`[B, H, S, L]`: the first P elements of q `[B, H, S, P + R]` times key_up `[G, P, L]`, computed from
    the input of q's projection.

    Raises:
        NoLatent: they are not the result of a projection.
    """
    groups, nope, rank = (int(n) for n in key_up.meta["val"].shape)
    heads = int(q.meta["val"].shape[1])
    found = find_projection(meaning, builder.call(aten.narrow.default, q, 3, 0, nope), "queries")
    assert found.up is not None
    x, up = builder.view(found.source.base, found.source.steps), builder.scaled(found.up)
    width = int(up.meta["val"].shape[2])

    def folded(x: Any, up: Any, key_up: Any, bias: Any) -> Any:  # x [B, 1, S, n], up [H, P, n]
        turned = of_each_head(key_up, heads).transpose(1, 2)  # [H, L, P]
        product = turned.bmm(up).reshape(heads * rank, width)
        rows = x.squeeze(1)
        if bias is not None:
            added = builder.traced(builder.view(bias.base, bias.steps))  # [1, H, 1, P]
            bias = turned.bmm(added.reshape(heads, nope, 1)).reshape([heads * rank])
        flat: Any = F.linear(rows, product, bias)
        return flat.unflatten(2, [heads, rank]).transpose(1, 2), product, bias

    value, *products = builder.trace(folded, x, up, key_up, found.bias)
    before = heads * nope * width + groups * nope * rank
    made = tuple(p for p in products if p is not None)
    return Folded(value, made, before, heads * rank * width, tuple(found.bases), width)


def of_each_head(weight: Any, heads: int, dim: int = 0) -> Any:
    """`[H, m, n]` for `[G, m, n]`, in a function that is traced."""
    groups = int(weight.shape[dim])
    return weight if groups == heads else aten.repeat_interleave.self_int(weight, heads // groups, dim)


@dataclasses.dataclass(frozen=True)
class Projection:
    """The contraction that takes an attention's result `[B, H, S, V]` to `[B, S, N]`: `weight` is its matrix
    as `[N, H, V]`, `bias` `[N]`."""

    node: fx.Node
    weight: tuple[fx.Node, tuple[layout.ViewOp, ...]]
    bias: fx.Node | None


def projection_of(meaning: Meaning, result: fx.Node) -> Projection:
    """The projection of an attention's result, with only views in between.

    Raises:
        Refused: the result has other uses, or does not enter as `[B, S, H * V]`.
    """
    node = result
    while True:
        if len(node.users) != 1:
            raise Refused(f"its result is used in {len(node.users)} places ({source_of(node)})")
        (user,) = node.users
        category = meaning.category(user)
        if category is Category.CONTRACTION:
            break
        if category is not Category.MOVEMENT:
            raise Refused(f"its result is not projected at once ({source_of(user)})")
        node = user
    shape = meaning.shape(user)
    if len(shape) != 3:
        raise Refused(f"its result is not projected as [batch, tokens, width] ({source_of(user)})")
    b, s, n = (E.var(name, extent) for name, extent in zip("bsn", shape, strict=True))
    try:
        element = meaning.element(user, (b, s, n))
    except Unliftable as problem:
        raise Refused(str(problem)) from problem
    found = sum_of_products(element)
    if found is None or found.factor != 1 or len(found.summed) != 1 or (
        found.added is not None and (found.added.op != "read" or found.added.args != (n,))
    ):  # fmt: skip
        raise Refused(f"its result is not projected by a plain product ({source_of(user)})")
    weight = _weight(meaning, result, found, (b, s, n))
    return Projection(user, weight, None if found.added is None else found.added.value)


def _weight(
    meaning: Meaning, result: fx.Node, product: SumOfProducts, at: tuple[Expr, Expr, Expr]
) -> tuple[fx.Node, tuple[layout.ViewOp, ...]]:
    (b, s, n), (inner,) = at, product.summed
    lifted = [
        meaning.lift(f, lambda r: r.value is not result and meaning.category(r.value) is Category.MOVEMENT)
        for f in product.factors
    ]
    own = next((f for f in lifted if f.op == "read" and f.value is result), None)
    weights = [f for f in product.factors if not f.free & {b, s}]
    if own is None or len(weights) != 1:
        raise Refused("its result is not projected by a plain product")
    digits = split_digits([inner], own.args) or {}
    cut = digits.get(inner, (inner,))
    index = tuple(M.substitute(i, {inner: recombined(cut)}) for i in own.args)
    places = zip(meaning.shape(result), (b, cut[0], s, cut[-1]), strict=True)
    if len(cut) != 2 or index != tuple(E.ZERO if E.is_const(n, 1) else p for n, p in places):
        raise Refused("its heads are not side by side where it is projected")
    (read,) = weights
    place = tuple(M.substitute(i, {inner: recombined(cut)}) for i in read.args)
    try:
        return read.value, layout.solve(meaning.shape(read.value), place, ((n,), (cut[0],), (cut[1],)))
    except layout.NoView as problem:
        raise Refused("the matrix that projects its result is no view of a tensor") from problem


def fold_result(builder: Builder, mixed: fx.Node, value_up: fx.Node, to: Projection) -> Folded:
    """`[B, S, N]`: mixed latents `[B, H, S, Lv]` times the product of value_up `[G, V, Lv]` and the
    projection."""
    groups, value, rank = (int(n) for n in value_up.meta["val"].shape)
    heads = int(mixed.meta["val"].shape[1])
    weight = builder.view(*to.weight)  # [N, H, V]
    out = int(weight.meta["val"].shape[0])

    def folded(mixed: Any, value_up: Any, weight: Any, bias: Any) -> Any:
        whole = weight.permute([1, 0, 2]).bmm(of_each_head(value_up, heads))  # [H, N, Lv]
        product = whole.permute([1, 0, 2]).reshape(out, heads * rank)
        return F.linear(mixed.transpose(1, 2).flatten(2), product, bias), product

    made, product = builder.trace(folded, mixed, value_up, weight, to.bias)
    before = heads * value * out + groups * value * rank
    sources = [to.weight[0], *([] if to.bias is None else [to.bias])]
    return Folded(made, (product,), before, heads * rank * out, tuple(sources), out)
