"""Sums weighted by normalised exponentials: where a softmax meets its values.

The algebra here is small. Whatever way a softmax was written, its meaning is
`exp(x[k]) * recip(sum over j of exp(x[j]))`, times what the model does to the weights afterwards,
times the values. This file takes the meaning of one element apart into these pieces:

    out = sum over k of  f(p[k]) * v[k]        p[k] = exp(x[k]) / (sum over j of exp(x[j]) + exp(sink))
"""

from __future__ import annotations

import dataclasses
import math

from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.ir.score import WEIGHT
from attngraph.meaning import simplify as M

LARGEST_MEANING = 20_000
"""Nodes of an expression beyond which it is not looked into any further."""


@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """`weight` is f(p), over the leaf `p`; `value` a read; `score` is x, over the key variables."""

    keys: tuple[Expr, ...]
    score: Expr
    weight: Expr
    value: Expr
    sink: Expr | None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why something that looks like attention is left alone."""

    reason: str


class Unnormalised:
    """A sum weighted by exponentials whose normaliser is not in sight (it may come later)."""


def weighted_sum(meaning: Expr) -> WeightedSum | Refusal | Unnormalised | None:
    """Take the meaning of one element apart; None where no exponential weighs a sum."""
    opened = _open_sum(meaning)
    if opened is None:
        return None
    keys, body = opened
    if sum(1 for _ in E.walk(body)) > LARGEST_MEANING:
        return Refusal("its meaning is too large to be looked into")
    exponentials = [n for n in E.walk(body) if n.op == "exp" and any(k in n.free for k in keys)]
    if not exponentials:
        return None
    found = _normalise(body, keys)
    if found is None:
        if not any(f.op == "recip" for f in E.walk(body)):
            return Unnormalised()
        return Refusal(
            "exponentials are summed, but what they are divided by is not their sum over the same keys"
        )
    if isinstance(found, Refusal):
        return found
    weighted, score, sink = found
    if any(n.op == "exp" and any(k in n.free for k in keys) for n in E.walk(weighted)):
        return Refusal("two different softmaxes weigh one sum")
    return _split_value(weighted, keys, score, sink)


def factors_of(node: Expr) -> tuple[Expr, ...]:
    return node.args if node.op == "mul" else (node,)


def _open_sum(meaning: Expr) -> tuple[tuple[Expr, ...], Expr] | None:
    """meaning = factors * sum over keys of body, as (keys, factors * body)."""
    outer = list(factors_of(meaning))
    for place, factor in enumerate(outer):
        if factor.op != "sum":
            continue
        keys: list[Expr] = []
        body = factor
        while body.op == "sum":
            keys.append(body.args[0])
            body = body.args[1]
        if any(n.op == "exp" and not n.free.isdisjoint(keys) for n in E.walk(body)):
            rest = outer[:place] + outer[place + 1 :]
            return tuple(keys), M.mul(*rest, body)
    return None


def _normalise(body: Expr, keys: tuple[Expr, ...]) -> tuple[Expr, Expr, Expr | None] | Refusal | None:
    """Replace exp(x) * recip(normaliser of x) by p: the new body, x, and the sink."""
    for product in E.walk(body):
        if product.op != "mul":
            continue
        weights = [f for f in product.args if f.op == "exp" and not f.free.isdisjoint(keys)]
        inverses = [f for f in product.args if f.op == "recip"]
        for weight in weights:
            for inverse in inverses:
                matched = _match_normaliser(weight.args[0], inverse.args[0], keys)
                if isinstance(matched, Refusal):
                    return matched
                if matched is None:
                    continue
                rest = [f for f in product.args if f is not weight and f is not inverse]
                replaced = M.substitute(body, {product: M.mul(WEIGHT, *rest)})
                return replaced, matched[0], matched[1]
    return None


def _match_normaliser(
    score: Expr, normaliser: Expr, keys: tuple[Expr, ...]
) -> tuple[Expr, Expr | None] | Refusal | None:
    """If `normaliser` is the sum of exp(score) over the keys (plus terms free of them): the score
    without what is free of the keys, and the sink."""
    terms = normaliser.args if normaliser.op == "add" else (normaliser,)
    sums = [t for t in terms if t.op == "sum"]
    if len(sums) != 1:
        return None
    places: list[Expr] = []
    inner = sums[0]
    while inner.op == "sum":
        places.append(inner.args[0])
        inner = inner.args[1]
    if inner.op != "exp" or [p.args for p in places] != [k.args for k in keys]:
        return None
    other = M.substitute(inner.args[0], dict(zip(places, keys, strict=True)))
    moving, fixed = split_by(score, keys)
    other_moving, other_fixed = split_by(other, keys)
    same = M.canonical_binders
    if same(moving) is not same(other_moving):
        return None
    if same(fixed) is not same(other_fixed):
        return Refusal("the weights and their normaliser are shifted by different amounts")
    extra = [t for t in terms if t is not sums[0]]
    if not extra:
        return moving, None
    if len(extra) > 1:
        return Refusal("more than one term joins the softmax's denominator")
    return moving, M.sub(_logarithm(extra[0]), fixed)


def _logarithm(term: Expr) -> Expr:
    if term.op == "const" and term.value > 0:
        return E.const(math.log(term.value))
    return M.log(term)


def split_by(node: Expr, keys: tuple[Expr, ...]) -> tuple[Expr, Expr]:
    """A sum as the terms that depend on the keys, and those that do not. Minus infinity swallows what
    is added to it, so a term may be taken out of a mask."""
    if node.op == "where" and E.NEG_INF in node.args[1:]:
        condition, yes, no = node.args
        inner, fixed = split_by(no if yes is E.NEG_INF else yes, keys)
        masked = (yes, inner) if yes is E.NEG_INF else (inner, no)
        return M.where(condition, *masked), fixed
    terms = node.args if node.op == "add" else (node,)
    moving = M.add(*(t for t in terms if not t.free.isdisjoint(keys)))
    return moving, M.add(*(t for t in terms if t.free.isdisjoint(keys)))


def _split_value(
    weighted: Expr, keys: tuple[Expr, ...], score: Expr, sink: Expr | None
) -> WeightedSum | Refusal:
    weights: list[Expr] = []
    values: list[Expr] = []
    for factor in factors_of(weighted):
        holds_weight = any(n is WEIGHT for n in E.walk(factor))
        is_value = factor.op == "read" and not factor.free.isdisjoint(keys)
        (values if is_value and not holds_weight else weights).append(factor)
    if not values:
        return Refusal("the softmax weights are summed, but no values are weighed by them")
    own = frozenset(keys).union(*(w.free for w in weights), score.free)
    main = [v for v in values if v.free - own] or values[-1:]
    if len(main) > 1:
        return Refusal("two tensors are multiplied as values; multiply them into one beforehand")
    weight = M.mul(*weights, *(v for v in values if v is not main[0]))
    return WeightedSum(keys, score, weight, main[0], sink)
