"""Sums weighted by normalised exponentials: where a softmax meets its values.

However a softmax is written, its meaning is `exp(x[k]) * recip(sum over j of exp(x[j]))`, times what
the model does to the weights afterwards, times the values. This file separates the meaning of one
element into these factors:

    out = sum over k of  f(p[k]) * v[k]        p[k] = exp(x[k]) / (sum over j of exp(x[j]) + exp(sink))

The keys of one softmax may come in parts that the model multiplies separately, each with values of its own
(global tokens and a block, as in Pegasus-X; a prefix and the text; kept keys and new ones):

    out = sum over g of  p[g] * u[g]  +  sum over x of  p[G + x] * v[x]

Weights are linear: where they are a sum over several softmaxes (differential attention), so is `out`.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from attngraph.ir import budgets
from attngraph.ir.language import WEIGHT, E, Expr
from attngraph.meaning.algebra import M, open_sums
from attngraph.meaning.attention.dot import Dot

from attngraph.meaning.attention.normaliser import (  # isort: skip
    Look, Refusal, is_normaliser, match_normaliser, pieces_of, split_by, why_not_normalised,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KeyPart:
    """Some of the keys that one softmax runs over, usually all of them.

    `keys` are their index variables. `score` is x, in which `dot` stands for the sum of `products` once those
    are known; `weight` is f(p), over the leaf `p`; `value` is a read.
    """

    keys: tuple[Expr, ...]
    score: Expr
    weight: Expr
    value: Expr
    products: tuple[Dot, ...] = ()


@dataclasses.dataclass(frozen=True)
class WeightedSum:
    """Values weighted by one softmax over the keys of all parts, in order, and a sink."""

    parts: tuple[KeyPart, ...]
    sink: Expr | None = None


class Unnormalised:
    """A sum weighted by exponentials without their normaliser (a later node may divide by it)."""


def weighted_sums(meaning: Expr, look: Look) -> tuple[WeightedSum, ...] | Refusal | Unnormalised | None:
    """Separate the meaning of one element into the sums that it adds up, each weighted by one softmax; None
    where no sum is weighted by an exponential."""
    if meaning.op == "add":
        whole = _sum_over_parts(meaning.args, look)
        if whole is not None:
            return (whole,)
        # Why the only one of the terms that is a sum weighted by exponentials is no attention.
        terms = [term for term in meaning.args if _open_sum(term) is not None]
        refused = weighted_sums(terms[0], look) if len(terms) == 1 else None
        return refused if isinstance(refused, Refusal) else None
    opened = _open_sum(meaning)
    if opened is None:
        return None
    keys, body = opened
    body = _with_one_divisor(body)
    if sum(1 for _ in E.walk(body)) > budgets.SUM_NODES:
        return Refusal("the formula of one of its elements is too large to be examined")
    if not _exponentials(body, keys):
        return None
    found: list[WeightedSum] = []
    for part in _by_softmax(body, keys):
        taken = _weighted_sum(part, keys, look)
        if not isinstance(taken, WeightedSum):
            return taken
        found.append(taken)
    return tuple(found)


def _sum_over_parts(terms: Sequence[Expr], look: Look) -> WeightedSum | None:
    """Terms that are parts of one softmax, in the order of its keys; None where they do not share one
    softmax, or do not cover it: the weights of a part by itself do not add up to one."""
    found = [t for t in map(_numerator, terms) if t is not None]
    if len(found) != len(terms) or len({M.canonical_binders(t.inverse) for t in found}) != 1:
        return None
    ordered: list[KeyPart] = []
    for piece in pieces_of(E.parts(found[0].inverse.args[0], "add"), look, 0):
        matching = [t for t in found if is_normaliser(piece, t.score, t.keys, look)]
        part = key_part(matching[0].weighted, matching[0].keys, matching[0].score) if matching else None
        if len(matching) != 1 or not isinstance(part, KeyPart) or part.keys in [p.keys for p in ordered]:
            return None
        ordered.append(part)
    return WeightedSum(tuple(ordered)) if len(ordered) == len(found) else None


def _with_one_divisor(node: Expr) -> Expr:
    """A gate joined with the row's divisor: sigmoid(log Z - c) / Z is 1 / (Z + exp(c))."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "sigmoid" and _adds_logarithm(args[0]):
            return M.recip(M.add(E.ONE, M.exp(M.neg(args[0]))))
        made = M.construct(current, args)
        return _merge_divisors(made) if made.op == "mul" else _complement(made)

    return E.rebuild(node, replace)


def _complement(node: Expr) -> Expr:
    """1 - 1 / (1 + x) as 1 / (1 + 1 / x)."""
    factor, rest = M.coefficient(M.sub(node, E.ONE))
    if node.op == "add" and factor == -1 and rest.op == "recip" and rest.args[0].op == "add":
        x = M.sub(rest.args[0], E.ONE)
        if x.op != "add":
            return M.recip(M.add(E.ONE, M.recip(x)))
    return node


def _adds_logarithm(node: Expr) -> bool:
    """Whether a number is the logarithm of a sum, perhaps with something added."""
    terms = (M.coefficient(term) for term in E.parts(node, "add"))
    return any(n in (1, -1) and t.op == "log" and any(x.op == "sum" for x in E.walk(t)) for n, t in terms)


def _merge_divisors(product: Expr) -> Expr:
    """x / Z / (a + b / Z) as x / (a * Z + b)."""
    divisors = [f.args[0] for f in product.args if f.op == "recip"]
    for inner, outer in itertools.permutations(divisors, 2):
        factors = [f for term in outer.args for f in E.parts(term, "mul")] if outer.op == "add" else []
        name = M.canonical_binders(inner)
        again = [f for f in factors if f.op == "recip" and M.canonical_binders(f.args[0]) is name]
        if again:
            terms = M.substitute(outer, dict.fromkeys(again, M.recip(inner))).args
            whole = M.add(*(M.mul(inner, term) for term in terms))
            rest = [f for f in product.args if f not in (M.recip(inner), M.recip(outer))]
            return M.mul(*rest, M.recip(whole))
    return product


def _exponentials(node: Expr, keys: tuple[Expr, ...]) -> frozenset[Expr]:
    return frozenset(n for n in E.walk(node) if n.op == "exp" and not n.free.isdisjoint(keys))


def _by_softmax(node: Expr, keys: tuple[Expr, ...]) -> list[Expr]:
    """What a node adds up, one term for each softmax: sums of several are multiplied out."""
    if len(_exponentials(node, keys)) < 2:
        return [node]
    if node.op == "add":
        return _gathered([part for term in node.args for part in _by_softmax(term, keys)], keys)
    if node.op == "sum":  # over a few stacked tensors
        terms = M.pieces(node.args[0], node.args[1])
        return _by_softmax(M.add(*terms), keys) if len(terms) > 1 else [node]
    if node.op == "where":
        condition, yes, no = node.args
        zero = E.const(0.0)
        shown = [M.where(condition, part, zero) for part in _by_softmax(yes, keys)]
        hidden = [M.where(condition, zero, part) for part in _by_softmax(no, keys)]
        return _gathered([*shown, *hidden], keys)
    if node.op == "mul":
        for place, factor in enumerate(node.args):
            parts = _by_softmax(factor, keys)
            if len(parts) > 1:
                rest = M.mul(*node.args[:place], *node.args[place + 1 :])
                return _gathered([t for p in parts for t in _by_softmax(M.mul(rest, p), keys)], keys)
    return [node]


def _gathered(terms: list[Expr], keys: tuple[Expr, ...]) -> list[Expr]:
    """Terms with the same exponentials added up; terms without exponentials join the first group."""
    groups: dict[frozenset[Expr], list[Expr]] = {}
    for term in terms:
        if not E.is_const(term, 0):
            groups.setdefault(_exponentials(term, keys), []).append(term)
    plain = groups.pop(frozenset(), [])
    first, *others = groups.values()
    return [M.add(*first, *plain), *(M.add(*same) for same in others)]


def _weighted_sum(body: Expr, keys: tuple[Expr, ...], look: Look) -> WeightedSum | Refusal | Unnormalised:
    found = _normalise(body, keys, look) or _normalise(_in_exponents(look(body)), keys, look)
    if found is None:
        if not any(f.op == "recip" for f in E.walk(body)):
            return Unnormalised()
        return why_not_normalised(body, keys)
    if isinstance(found, Refusal):
        return found
    weighted, score, sink = found
    if _exponentials(weighted, keys):
        return Refusal("its weights are computed from two softmaxes, but are not a sum of them")
    part = key_part(weighted, keys, score)
    return part if isinstance(part, Refusal) else WeightedSum((part,), sink)


def _open_sum(meaning: Expr) -> tuple[tuple[Expr, ...], Expr] | None:
    """meaning = factors * sum over keys of body, as (keys, factors * body)."""
    outer = list(E.parts(meaning, "mul"))
    for place, factor in enumerate(outer):
        if factor.op != "sum":
            continue
        keys, body = open_sums(factor)
        if _exponentials(body, keys):
            return keys, M.mul(*outer[:place], *outer[place + 1 :], body)
    return None


def _normalise(
    body: Expr, keys: tuple[Expr, ...], look: Look
) -> tuple[Expr, Expr, Expr | None] | Refusal | None:
    """Replace exp(x) * recip(normaliser of x) by p: the new body, x, and the sink."""
    for product in (n for n in E.walk(body) if n.op == "mul"):
        weights = [f for f in product.args if f.op == "exp" and not f.free.isdisjoint(keys)]
        inverses = [f for f in product.args if f.op == "recip"]
        for weight, inverse in itertools.product(weights, inverses):
            matched = _matched(weight.args[0], inverse.args[0], keys, look)
            if isinstance(matched, Refusal):
                return matched
            if matched is not None:
                score, sink, factor = matched
                return _replace(body, weight, inverse, factor), score, sink
    return None


def _matched(
    exponent: Expr, normaliser: Expr, keys: tuple[Expr, ...], look: Look
) -> tuple[Expr, Expr | None, Expr] | Refusal | None:
    """The score, the sink, and a factor of the weight. A factor that the model wrote as an exponential (a
    learned one of each head, say) became a term of the exponent; unlike a shift by the row's maximum it is no
    term of the normaliser's exponents."""
    matched = match_normaliser(exponent, normaliser, keys, look)
    if not isinstance(matched, Refusal):
        return None if matched is None else (*matched, E.ONE)
    _, fixed = split_by(exponent, keys)
    summed = (open_sums(each)[1] for each in E.parts(normaliser, "add"))
    shifts = {t for inner in summed if inner.op == "exp" for t in E.parts(inner.args[0], "add")}
    factors = [t for t in E.parts(fixed, "add") if t not in shifts]
    rest = M.sub(exponent, M.add(*factors))
    found = match_normaliser(rest, normaliser, keys, look) if factors else matched
    return (*found, M.exp(M.add(*factors))) if isinstance(found, tuple) else matched


def _replace(body: Expr, weight: Expr, inverse: Expr, factor: Expr = E.ONE) -> Expr:
    """The body with p times a factor wherever the weight and the inverse stand together."""
    products = [n for n in E.walk(body) if n.op == "mul" and {weight, inverse} <= set(n.args)]
    rest = ([f for f in product.args if f not in (weight, inverse)] for product in products)
    whole = (M.mul(WEIGHT, factor, *factors) for factors in rest)
    return M.substitute(body, dict(zip(products, whole, strict=True)))


def _in_exponents(node: Expr) -> Expr:
    """Exponentials multiplied by one or zero, rewritten as exponentials of scores with a mask added."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "where":
            condition, yes, no = args
            if E.is_const(yes, 0):
                condition, yes, no = M.not_(condition), no, yes
            weight = next((f for f in E.parts(yes, "mul") if f.op == "exp"), None)
            if E.is_const(no, 0) and weight is not None:
                masked = M.exp(M.add(weight.args[0], M.where(condition, E.ZERO, E.NEG_INF)))
                return M.mul(masked, *(f for f in E.parts(yes, "mul") if f is not weight))
        return M.construct(current, args)

    return E.rebuild(node, replace)


def key_part(weighted: Expr, keys: tuple[Expr, ...], score: Expr) -> KeyPart | Refusal:
    """Separate the weight from the value."""
    weights: list[Expr] = []
    values: list[Expr] = []
    for factor in E.parts(weighted, "mul"):
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
    return KeyPart(keys, score, weight, main[0])


@dataclasses.dataclass(frozen=True)
class _Numerator:
    """A sum over keys of exp(score) / normaliser times the rest: `weighted` with p for that quotient, and the
    reciprocal of the normaliser, which has not been examined yet."""

    keys: tuple[Expr, ...]
    score: Expr
    weighted: Expr
    inverse: Expr


def _numerator(meaning: Expr) -> _Numerator | None:
    """A term as a sum weighted by one exponential over some divisor; None if it has another form."""
    opened = _open_sum(meaning)
    if opened is None:
        return None
    keys, body = opened
    for product in (n for n in E.walk(body) if n.op == "mul"):
        weights = [f for f in product.args if f.op == "exp" and not f.free.isdisjoint(keys)]
        inverses = [f for f in product.args if f.op == "recip" and f.free.isdisjoint(keys)]
        if len(weights) == len(inverses) == 1:
            weighted = _replace(body, weights[0], inverses[0])
            found = _Numerator(keys, weights[0].args[0], weighted, inverses[0])
            return None if _exponentials(weighted, keys) else found
    return None
