"""What exponentials are divided by: is it their sum over the keys?

A normaliser may be written over the keys as one dimension or as several, in pieces whose scores were
concatenated, shifted by a maximum, and with terms of its own (sinks). It is compared with the weights by
meaning: both are brought to one form, and the sums' variables are matched.

Where they are divided by something else, `why_not_normalised` says by what. A refusal is a value, handed up
to the report.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from attngraph.ir import budgets
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import Digits, M, open_sums, ranges, recombined, split_digits
from attngraph.meaning.rule import Unliftable, UnliftableBecause

_One = TypeVar("_One")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`sizes` are symbolic sizes that cause it: with numbers in their place it might be recognised."""

    reason: str
    sizes: frozenset[str] = frozenset()


def collected(found: Iterable[_One | Refusal]) -> tuple[_One, ...] | Refusal:
    """All of these, or the first refusal among them."""
    kept: list[_One] = []
    for each in found:
        if isinstance(each, Refusal):
            return each
        kept.append(each)
    return tuple(kept)


def stands_between(problem: Unliftable) -> str:
    """What keeps an element from being followed, as the reason why the softmax before it is left alone."""
    if isinstance(problem, UnliftableBecause):
        return str(problem)
    return f"between its scores and the sum of its values stands {problem}, which is not looked into"


Look = Callable[[Expr], Expr]
"""Looks into the reads of an expression, through whatever is elementwise."""
Matched = tuple[Expr, Expr | None]


def match_normaliser(
    score: Expr, normaliser: Expr, keys: tuple[Expr, ...], look: Look
) -> Matched | Refusal | None:
    """If `normaliser` is the sum of exp(score) over the keys (plus terms that do not depend on them): the
    score without terms that do not depend on the keys, and the sink."""
    terms = E.parts(normaliser, "add")
    found = _match_terms(score, terms, keys)
    if found is not None or not any(t.op == "sum" for t in terms):
        return found
    # The softmax may run over the keys as one dimension or as several, or over more than these keys.
    for parts in (pieces_of(terms, look, budgets.SUMMANDS), _behind(keys, terms, look)):
        if (found := _match_terms(look(score), parts, keys)) is not None:
            return found
    return None


def _behind(keys: tuple[Expr, ...], terms: Sequence[Expr], look: Look) -> list[Expr]:
    """The terms of a normaliser, each sum cut where the keys end: behind them is something else."""
    found: list[Expr] = []
    for variables, inner in (open_sums(look(term)) for term in terms):
        count = keys[0].args[0]
        whole = len(keys) != 1 or len(variables) != 1 or variables[0].args[0] is count
        if whole or not ranges.is_at_most(count, variables[0].args[0]):
            found.append(functools.reduce(lambda body, v: M.total(v, body), reversed(variables), inner))
            continue
        more = M.sub(variables[0].args[0], count)
        first, rest = E.var(variables[0].value, count), E.var(f"{variables[0].value} behind", more)
        found.append(M.total(first, M.substitute(inner, {variables[0]: first})))
        behind = M.total(rest, M.substitute(inner, {variables[0]: M.add(count, rest)}))
        found += M.pieces(rest, behind.args[1]) if behind.op == "sum" else [behind]
    return found


def pieces_of(terms: Sequence[Expr], look: Look, few: int) -> list[Expr]:
    """The terms of a normaliser, taken apart where its scores were concatenated; pieces of at most `few`
    elements element by element."""
    parts: list[Expr] = []
    for variables, inner in (open_sums(look(term)) for term in terms):
        split = [inner]
        for variable in reversed(variables):
            split = [piece for body in split for piece in M.pieces(variable, body, few)]
        parts += split
    return parts


def _match_terms(score: Expr, terms: Sequence[Expr], keys: tuple[Expr, ...]) -> Matched | Refusal | None:
    for place, term in enumerate(terms):
        found = _match_sum(score, term, keys)
        if isinstance(found, Refusal):
            return found
        if found is not None:
            moving, fixed = found
            extra = [t for t in (*terms[:place], *terms[place + 1 :]) if not E.is_const(t, 0)]
            return moving, M.sub(logarithm(extra), fixed) if extra else None
    return None


def _match_sum(score: Expr, term: Expr, keys: tuple[Expr, ...]) -> tuple[Expr, Expr] | Refusal | None:
    """The score and the shift, if a term sums the score's exponentials over the keys, or their digits."""
    places, inner = open_sums(term)
    if inner.op != "exp" or not places:
        return None
    (other,), shifted = inner.args, split_by(score, keys)
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
    for order in itertools.permutations(places) if len(places) <= budgets.KEY_ORDERS else (places,):
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
    """Masks that add minus infinity, rewritten to replace the score by it: the weights are the same."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        masks = [a for a in args if a.op == "where" and E.NEG_INF in a.args[1:]]
        if current.op != "add" or not masks:
            return M.construct(current, args)
        condition, *branches = masks[0].args
        rest = [a for a in args if a is not masks[0]]
        return M.where(condition, *(x if x is E.NEG_INF else M.add(x, *rest) for x in branches))

    return E.rebuild(node, replace)


def _cut(
    node: Expr, variables: tuple[Expr, ...], digits: dict[Expr, Digits]
) -> tuple[tuple[Expr, ...], Expr]:
    """The variables' digits, and `node` in terms of them."""
    parts = tuple(d for v in variables for d in digits.get(v, (v,)))
    return parts, M.substitute(node, {v: recombined(d) for v, d in digits.items()})


def logarithm(terms: Sequence[Expr]) -> Expr:
    """The logarithm of a sum of exponentials, shifted so that none overflows."""
    logs = [E.const(math.log(t.value)) if t.op == "const" and t.value > 0 else M.log(t) for t in terms]
    if len(logs) == 1:
        return logs[0]
    top = functools.reduce(lambda a, b: M.function("max", a, b), logs)
    return M.add(top, M.log(M.add(*(M.exp(M.sub(x, top)) for x in logs))))


def split_by(node: Expr, keys: tuple[Expr, ...]) -> tuple[Expr, Expr]:
    """A sum as the terms that depend on the keys, and those that do not. Adding to minus infinity changes
    nothing, so a term may be taken out of a mask."""
    if node.op == "where" and E.NEG_INF in node.args[1:]:
        condition, yes, no = node.args
        inner, fixed = split_by(no if yes is E.NEG_INF else yes, keys)
        masked = (yes, inner) if yes is E.NEG_INF else (inner, no)
        return M.where(condition, *masked), fixed
    terms = E.parts(node, "add")
    moving = M.add(*(t for t in terms if not t.free.isdisjoint(keys)))
    return moving, M.add(*(t for t in terms if t.free.isdisjoint(keys)))


def is_normaliser(piece: Expr, score: Expr, keys: tuple[Expr, ...], look: Look) -> bool:
    """Whether a term of a normaliser is the sum of the exponentials of these scores."""
    return isinstance(_match_sum(look(score), piece, keys), tuple)


def why_not_normalised(body: Expr, keys: tuple[Expr, ...]) -> Refusal:
    """The reason for a sum over these keys whose exponentials are not divided by their sum over them."""
    if _is_over_pairs(body, keys) or _is_over_two_dimensions(body, keys):
        return Refusal(
            "its softmax runs over two dimensions at once, as over all pairs of a query and a key or of two "
            "keys: attention has a softmax over the keys of each query alone"
        )
    if bool(_combined(body, keys)):
        return Refusal(
            "its softmax runs over places that depend on query and key together, such as distances in a "
            "band: give each query a score for each key, and mask those outside the band"
        )
    if _is_over_another_dimension(body, keys):
        return Refusal(
            "its weights are summed over another dimension than the one that the softmax runs over, as "
            "where heads are mixed after it or where it normalises over the queries"
        )
    if _is_over_other_places(body, keys):
        return Refusal(
            "its softmax runs over other places than the keys that its weights are summed over here, as "
            "where a row and a column of keys share one softmax: sum the values of all its places at once"
        )

    def has_exponential(factor: Expr) -> bool:
        return any(n.op == "exp" for n in E.outside(factor, "recip"))

    products = (n for n in E.outside(body, "recip") if n.op == "mul")
    if any(sum(map(has_exponential, product.args)) > 1 for product in products):
        return Refusal(
            "it multiplies exponentials of two tensors and sums the products, as linear attention with "
            "exponential features does: no softmax of scores weighs its values"
        )
    return Refusal(
        "exponentials are summed, but what they are divided by was not recognised as their sum over the keys"
    )


def _weights_and_divisors(body: Expr, keys: tuple[Expr, ...]) -> tuple[set[Expr], list[Expr]]:
    """The exponentials that vary over the keys, and the sums that something is divided by."""
    nodes = list(E.walk(body))
    weights = {n for n in nodes if n.op == "exp" and not n.free.isdisjoint(keys)}
    return weights, [n.args[0] for n in nodes if n.op == "recip" and n.args[0].op == "sum"]


def _is_over_two_dimensions(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether an exponential is divided by the sum of such over the keys and another dimension of its own."""
    weights, divisors = _weights_and_divisors(body, keys)
    several = [d for d in divisors if len(open_sums(d)[0]) > len(keys)]
    return any(weight.free - set(keys) > divisor.free for divisor in several for weight in weights)


def _is_over_another_dimension(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether an exponential is divided by the sum over a dimension of the result, not over the keys."""
    weights, divisors = _weights_and_divisors(body, keys)
    for divisor in (d for d in divisors if not d.free.isdisjoint(keys)):
        variables, inner = open_sums(divisor)
        for weight in weights if len(variables) == 1 else ():
            places = weight.free - divisor.free - set(keys)
            if any(M.substitute(inner, {variables[0]: place}) is weight for place in places):
                return True
    return False


def _is_over_other_places(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether an exponential is divided by the sum of the same exponentials over another range of places."""
    weights, divisors = _weights_and_divisors(body, keys)
    places = {a for w in weights for r in E.reads(w) for a in r.args if not a.free.isdisjoint(keys)}
    for divisor in (d for d in divisors if d.free.isdisjoint(keys)):
        (variable, *more), inner = open_sums(divisor)
        others = (p for p in places if p.op != "var" or p.args[0] is not variable.args[0])
        if not more and any(M.substitute(inner, {variable: place}) in weights for place in others):
            return True
    return False


def _is_over_pairs(body: Expr, keys: tuple[Expr, ...]) -> bool:
    """Whether such an index counts pairs: the key is one digit of it, and the other variables are another."""

    def step(place: Expr, variable: Expr) -> Expr:
        return M.sub(M.substitute(place, {variable: M.add(variable, E.ONE)}), place)

    def counts(place: Expr) -> bool:
        mine = [v for v in place.free if v in keys]
        others = [v for v in place.free if v not in keys]
        pairs = ((mine, others), (others, mine)) if len(mine) == len(others) == 1 else ()
        return any(step(place, of[0]) is by[0].args[0] for by, of in pairs)

    return any(map(counts, _combined(body, keys)))


def _combined(body: Expr, keys: tuple[Expr, ...]) -> list[Expr]:
    """The indices that combine a key with another variable, where a normaliser sums over the whole index."""
    mixed: list[tuple[tuple[object, int], Expr]] = []
    summed: set[tuple[object, int]] = set()
    bound = {n.args[0] for n in E.walk(body) if n.op == "sum"}
    for read in (n for e in E.walk(body) if e.op == "exp" for n in E.reads(e)):
        for axis, place in enumerate(read.args):
            if place in bound:
                summed.add((read.value, axis))
            elif not place.free.isdisjoint(keys) and not place.free <= set(keys):
                mixed.append(((read.value, axis), place))
    return [place for dimension, place in mixed if dimension in summed]
