"""What exponentials are divided by: is it their sum over the keys?

A normaliser may be written over the keys as one dimension or as several, in pieces whose scores were
concatenated, shifted by a maximum, and with terms of its own (sinks). It is compared with the weights by
meaning: both are brought to one form, and the sums' variables are matched.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

from attngraph.ir import budgets
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import Digits, M, recombined, split_digits
from attngraph.meaning.attention.refusal import Refusal

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
    return _match_terms(look(score), pieces_of(terms, look, budgets.SUMMANDS), keys)


def pieces_of(terms: Sequence[Expr], look: Look, few: int) -> list[Expr]:
    """The terms of a normaliser, taken apart where its scores were concatenated; pieces of at most `few`
    elements element by element."""
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
        return moving, M.sub(logarithm(extra), fixed) if extra else None
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
    """The score and the shift, if `other` over `places`, maybe digits of keys, is `score` over `keys`."""
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
        if current.op == "add":
            for place, term in enumerate(args):
                if term.op == "where" and E.NEG_INF in term.args[1:]:
                    rest = (*args[:place], *args[place + 1 :])
                    branches = (x if x is E.NEG_INF else M.add(x, *rest) for x in term.args[1:])
                    return M.where(term.args[0], *branches)
        return M.construct(current, args)

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
    variables, inner = open_sums(piece)
    if inner.op != "exp" or not variables:
        return False
    return isinstance(_match_sum(look(score), variables, inner.args[0], keys), tuple)
