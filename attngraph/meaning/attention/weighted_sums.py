"""Sums weighted by normalised exponentials: where a softmax meets its values.

The algebra here is small. Whatever way a softmax was written, its meaning is
`exp(x[k]) * recip(sum over j of exp(x[j]))`, times what the model does to the weights afterwards,
times the values. This file takes the meaning of one element apart into these pieces:

    out = sum over k of  f(p[k]) * v[k]        p[k] = exp(x[k]) / (sum over j of exp(x[j]) + exp(sink))

Weights are linear: where they are a sum over several softmaxes (differential attention), so is `out`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import WEIGHT
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.digits import Digits, joined, split_digits

MOST_DIGITS = 4
"""Keys that are tried in any order: more would be tried only in the one they come in."""
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
    """Why something that looks like attention is left alone. `sizes` are symbolic sizes that it might be
    understood without: if they were numbers."""

    reason: str
    sizes: frozenset[str] = frozenset()


Look = Callable[[Expr], Expr]


class Unnormalised:
    """A sum weighted by exponentials whose normaliser is not in sight (it may come later)."""


def weighted_sums(meaning: Expr, look: Look) -> tuple[WeightedSum, ...] | Refusal | Unnormalised | None:
    """Take the meaning of one element apart into sums that it adds up, each weighed by one softmax; None
    where no exponential weighs a sum.

    Args:
        look: looks into the reads of an expression, through whatever is elementwise.
    """
    opened = _open_sum(meaning)
    if opened is None:
        return None
    keys, body = opened
    body = _with_one_divisor(body)
    if sum(1 for _ in E.walk(body)) > LARGEST_MEANING:
        return Refusal("its meaning is too large to be looked into")
    if not _exponentials(body, keys):
        return None
    found: list[WeightedSum] = []
    for part in _by_softmax(body, keys):
        taken = _weighted_sum(part, keys, look)
        if not isinstance(taken, WeightedSum):
            return taken
        found.append(taken)
    return tuple(found)


def _with_one_divisor(node: Expr) -> Expr:
    """Gates of a row's total as a part of what the row is divided by: sigmoid(log Z - c) / Z is
    1 / (Z + exp(c))."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "sigmoid" and _adds_logarithm(args[0]):
            return M.recip(M.add(E.ONE, M.exp(M.neg(args[0]))))
        made = current if current.op == "var" else M.construct(current, args)
        return _join_divisors(made) if made.op == "mul" else _complement(made)

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
    terms = (M.coefficient(term) for term in (node.args if node.op == "add" else (node,)))
    return any(n in (1, -1) and t.op == "log" and any(x.op == "sum" for x in E.walk(t)) for n, t in terms)


def _join_divisors(product: Expr) -> Expr:
    """x / Z / (a + b / Z) as x / (a * Z + b)."""
    divisors = [f.args[0] for f in product.args if f.op == "recip"]
    for inner, outer in itertools.permutations(divisors, 2):
        factors = [f for term in outer.args for f in factors_of(term)] if outer.op == "add" else []
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
    if node.op == "sum":  # of a few that were stacked
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
    """Terms of the same exponentials added up; those of none go to any others."""
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
        if _is_banded(body, keys):
            return Refusal(
                "its softmax runs over places that depend on query and key together, such as distances in a "
                "band: give each query a score for each key, and mask those outside the band"
            )
        return Refusal(
            "exponentials are summed, but what they are divided by is not their sum over the same keys"
        )
    if isinstance(found, Refusal):
        return found
    weighted, score, sink = found
    if _exponentials(weighted, keys):
        return Refusal("its weights are a function of two softmaxes that is no sum of them")
    return _split_value(weighted, keys, score, sink)


def _is_banded(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether exponentials are read at a place that mixes a key with something else, and are summed over
    that place as a whole to normalise them."""
    mixed: set[tuple[object, int]] = set()
    summed: set[tuple[object, int]] = set()
    bound = {n.args[0] for n in E.walk(body) if n.op == "sum"}
    for read in (n for e in E.walk(body) if e.op == "exp" for n in E.walk(e) if n.op == "read"):
        for axis, place in enumerate(read.args):
            if place in bound:
                summed.add((read.value, axis))
            elif not place.free.isdisjoint(keys) and not place.free <= set(keys):
                mixed.add((read.value, axis))
    return not mixed.isdisjoint(summed)


def factors_of(node: Expr) -> tuple[Expr, ...]:
    return node.args if node.op == "mul" else (node,)


def _open_sum(meaning: Expr) -> tuple[tuple[Expr, ...], Expr] | None:
    """meaning = factors * sum over keys of body, as (keys, factors * body)."""
    outer = list(factors_of(meaning))
    for place, factor in enumerate(outer):
        if factor.op != "sum":
            continue
        keys, body = open_sums(factor)
        if any(n.op == "exp" and not n.free.isdisjoint(keys) for n in E.walk(body)):
            rest = outer[:place] + outer[place + 1 :]
            return keys, M.mul(*rest, body)
    return None


def _normalise(
    body: Expr, keys: tuple[Expr, ...], look: Look
) -> tuple[Expr, Expr, Expr | None] | Refusal | None:
    """Replace exp(x) * recip(normaliser of x) by p: the new body, x, and the sink."""
    for product in E.walk(body):
        if product.op != "mul":
            continue
        weights = [f for f in product.args if f.op == "exp" and not f.free.isdisjoint(keys)]
        inverses = [f for f in product.args if f.op == "recip"]
        for weight in weights:
            for inverse in inverses:
                matched = _match_normaliser(weight.args[0], inverse.args[0], keys, look)
                if isinstance(matched, Refusal):
                    return matched
                if matched is None:
                    continue
                return _replace(body, weight, inverse), matched[0], matched[1]
    return None


def _replace(body: Expr, weight: Expr, inverse: Expr) -> Expr:
    """The body with p in the place of the weight times the inverse, wherever they stand together."""
    found: dict[Expr, Expr] = {}
    for product in E.walk(body):
        if product.op == "mul" and weight in product.args and inverse in product.args:
            found[product] = M.mul(WEIGHT, *(f for f in product.args if f not in (weight, inverse)))
    return M.substitute(body, found)


def _in_exponents(node: Expr) -> Expr:
    """Exponentials multiplied by one or zero as exponentials of scores to which a mask is added."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "where":
            condition, yes, no = args
            if E.is_const(yes, 0):
                condition, yes, no = M.not_(condition), no, yes
            weight = next((f for f in factors_of(yes) if f.op == "exp"), None)
            if E.is_const(no, 0) and weight is not None:
                masked = M.exp(M.add(weight.args[0], M.where(condition, E.ZERO, E.NEG_INF)))
                return M.mul(masked, *(f for f in factors_of(yes) if f is not weight))
        return current if current.op == "var" else M.construct(current, args)

    return E.rebuild(node, replace)


Matched = tuple[Expr, Expr | None]


def _match_normaliser(
    score: Expr, normaliser: Expr, keys: tuple[Expr, ...], look: Look
) -> Matched | Refusal | None:
    """If `normaliser` is the sum of exp(score) over the keys (plus terms free of them): the score
    without what is free of the keys, and the sink."""
    terms = normaliser.args if normaliser.op == "add" else (normaliser,)
    found = _match_terms(score, terms, keys)
    if found is not None or not any(t.op == "sum" for t in terms):
        return found
    # The softmax may run over the keys as one dimension or as several, or over more than these keys.
    return _match_terms(look(score), pieces_of(terms, look, M.FEW), keys)


def pieces_of(terms: Sequence[Expr], look: Look, few: int) -> list[Expr]:
    """The terms of a normaliser, taken apart where its scores were joined; pieces of at most `few` elements
    element by element."""
    parts: list[Expr] = []
    for term in terms:
        variables, inner = open_sums(look(term))
        split = [inner]
        for variable in reversed(variables):
            split = [piece for body in split for piece in M.pieces(variable, body, few)]
        parts += split
    return parts


def _match_terms(score: Expr, terms: Sequence[Expr], keys: tuple[Expr, ...]) -> Matched | Refusal | None:
    for place, term in enumerate(terms):
        variables, inner = open_sums(term)
        if inner.op != "exp" or not variables:
            continue
        found = _match_sum(score, variables, inner.args[0], keys)
        if found is None or isinstance(found, Refusal):
            if found is not None:
                return found
            continue
        moving, fixed = found
        extra = [t for t in (*terms[:place], *terms[place + 1 :]) if not E.is_const(t, 0)]
        return moving, M.sub(_logarithm(extra), fixed) if extra else None
    return None


def open_sums(node: Expr) -> tuple[tuple[Expr, ...], Expr]:
    """Nested sums as (variables, body)."""
    variables: list[Expr] = []
    while node.op == "sum":
        variables.append(node.args[0])
        node = node.args[1]
    return tuple(variables), node


def _match_sum(
    score: Expr, places: tuple[Expr, ...], other: Expr, keys: tuple[Expr, ...]
) -> tuple[Expr, Expr] | Refusal | None:
    """If `other` over `places` is `score` over `keys`, up to a shift: the score and the shift. Keys of
    one side may be digits of a key of the other."""
    shifted = split_by(score, keys)
    found = _same_terms(score, keys, places, other)
    if found is None:
        cuts = split_digits(keys, [score]), split_digits(places, [other])
        if None in cuts or not any(cuts):
            return None
        mine, score = _cut(score, keys, cuts[0] or {})
        theirs, other = _cut(other, places, cuts[1] or {})
        found = _same_terms(score, mine, theirs, other)
    return shifted if found is True else found


def _same_terms(
    score: Expr, keys: tuple[Expr, ...], places: tuple[Expr, ...], other: Expr
) -> Literal[True] | Refusal | None:
    """Whether `other` over `places`, taken in some order, is `score` over `keys`."""

    def same(part: Expr) -> Expr:
        return M.canonical_binders(_put(part))

    moving, fixed = (same(part) for part in split_by(score, keys))
    for order in itertools.permutations(places) if len(places) <= MOST_DIGITS else (places,):
        if [p.args for p in order] != [k.args for k in keys]:
            continue
        renamed = M.substitute(other, dict(zip(order, keys, strict=True)))
        other_moving, other_fixed = (same(part) for part in split_by(renamed, keys))
        if moving is other_moving:
            if fixed is other_fixed:
                return True
            return Refusal("the weights and their normaliser are shifted by different amounts")
    return None


def _put(node: Expr) -> Expr:
    """Masks that add minus infinity as masks that put it there: the same weights."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "add":
            for place, term in enumerate(args):
                if term.op == "where" and E.NEG_INF in term.args[1:]:
                    rest = (*args[:place], *args[place + 1 :])
                    branches = (x if x is E.NEG_INF else M.add(x, *rest) for x in term.args[1:])
                    return M.where(term.args[0], *branches)
        return current if current.op == "var" else M.construct(current, args)

    return E.rebuild(node, replace)


def _cut(
    node: Expr, variables: tuple[Expr, ...], digits: dict[Expr, Digits]
) -> tuple[tuple[Expr, ...], Expr]:
    """The variables' digits, and `node` in terms of them."""
    parts = tuple(d for v in variables for d in digits.get(v, (v,)))
    return parts, M.substitute(node, {v: joined(d) for v, d in digits.items()})


def _logarithm(terms: Sequence[Expr]) -> Expr:
    """The logarithm of a sum of exponentials, shifted so that none overflows."""
    logs = [E.const(math.log(t.value)) if t.op == "const" and t.value > 0 else M.log(t) for t in terms]
    if len(logs) == 1:
        return logs[0]
    top = functools.reduce(lambda a, b: M.function("max", a, b), logs)
    return M.add(top, M.log(M.add(*(M.exp(M.sub(x, top)) for x in logs))))


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


@dataclasses.dataclass(frozen=True)
class Numerator:
    """A sum over keys of exp(score) / normaliser times the rest: `weighted` with p for that quotient, and the
    reciprocal of the normaliser, of which nothing is known yet."""

    keys: tuple[Expr, ...]
    score: Expr
    weighted: Expr
    inverse: Expr

    def split(self) -> WeightedSum | Refusal:
        """With weight and value apart."""
        return _split_value(self.weighted, self.keys, self.score, None)


def numerator(meaning: Expr) -> Numerator | None:
    """A term as a sum weighted by one exponential over something; None where it is none."""
    opened = _open_sum(meaning)
    if opened is None:
        return None
    keys, body = opened
    for product in E.walk(body):
        if product.op == "mul":
            weights = [f for f in product.args if f.op == "exp" and not f.free.isdisjoint(keys)]
            inverses = [f for f in product.args if f.op == "recip" and f.free.isdisjoint(keys)]
            if len(weights) == len(inverses) == 1:
                weighted = _replace(body, weights[0], inverses[0])
                if any(n.op == "exp" and not n.free.isdisjoint(keys) for n in E.walk(weighted)):
                    return None
                return Numerator(keys, weights[0].args[0], weighted, inverses[0])
    return None


def is_normaliser(piece: Expr, part: Numerator, look: Look) -> bool:
    """Whether a term of a normaliser is the sum of the exponentials of this part's scores."""
    variables, inner = open_sums(piece)
    if inner.op != "exp" or not variables:
        return False
    return isinstance(_match_sum(look(part.score), variables, inner.args[0], part.keys), tuple)
