"""Scores that are made up of several products: equal ones become one, others become parts of the keys.

A product that the model computes tile by tile is many contractions in the graph, and one by its meaning:
`join_equal_products` compares the elements that they sum. Where a condition chooses between different
products, `split_by_product` takes the keys once for each, hidden where the condition chooses another:

    softmax of where(m, q.k, g.h)    =    one softmax over the keys k where m holds, and h where it does not

so that no product has to be computed as a whole. Nothing here looks at masks or values.
"""

import dataclasses

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.language import WEIGHT, E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.attention import dot as dots
from attngraph.meaning.attention.weighted_sums import KeyPart
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category


def join_equal_products(meaning: Meaning, part: KeyPart) -> KeyPart:
    """The part with one name for all products that sum the same elements, up to a number."""
    keys = part.keys
    reads = list(dict.fromkeys(p for x in (part.score, part.weight) for p in _products(meaning, x, keys)))
    if len(reads) < 2:
        return part
    first: dict[Expr, tuple[Expr, float]] = {}
    named: dict[Expr, Expr] = {}
    for read in reads:
        opened = dots.open_product(meaning, read, keys)
        if opened is None:
            continue
        (q, of_q), (k, of_k) = opened.q[-1], opened.k[-1]
        whole, factor = M.mul(q, k), opened.factor * of_q * of_k
        for variable in reversed(opened.inner):
            whole = M.total(variable, whole)
        one, own = first.setdefault(M.canonical_binders(whole), (read, factor))
        if one is not read and own:
            named[read] = M.mul(E.const(factor / own), one) if factor != own else one
    score, weight = (M.substitute(x, named) for x in (part.score, part.weight))
    return dataclasses.replace(part, score=score, weight=weight)


def split_by_product(meaning: Meaning, part: KeyPart) -> list[KeyPart]:
    """The part once for each of the products that conditions choose between; the part itself where there is
    one, or more than `budgets.SUMMANDS`."""
    found = _split(meaning, part)
    return found if len(found) <= budgets.SUMMANDS else [part]


def _split(meaning: Meaning, part: KeyPart) -> list[KeyPart]:
    for node in dots.outermost_first(part.score):
        if node.op != "where":
            continue
        condition, *branches = node.args
        one, other = (frozenset(_products(meaning, branch, part.keys)) for branch in branches)
        if one and other and one != other and not _products(meaning, condition, part.keys):
            kept = [(condition, 1), (M.not_(condition), 2)]
            return [p for shown, branch in kept for p in _split(meaning, _where(part, node, shown, branch))]
    return [part]


def _where(part: KeyPart, choice: Expr, shown: Expr, branch: int) -> KeyPart:
    """The part at the keys that are shown, where what a condition chooses is this branch of the choice. Other
    keys have no weight, whatever is added to weights after the softmax."""
    score = M.substitute(part.score, {choice: choice.args[branch]})
    same = [n for n in E.walk(part.weight) if n.op == "where" and n.args[0] is choice.args[0]]
    weight = M.substitute(part.weight, {n: n.args[branch] for n in same})
    if not E.is_const(M.substitute(weight, {WEIGHT: E.ZERO}), 0):
        weight = M.where(shown, weight, E.ZERO)
    return dataclasses.replace(part, score=M.where(shown, score, E.NEG_INF), weight=weight)


def _products(meaning: Meaning, node: Expr, keys: tuple[Expr, ...]) -> list[Expr]:
    """The reads of contractions that vary over the keys."""
    reads = (n for n in E.reads(node) if isinstance(n.value, fx.Node))
    return [
        n for n in dict.fromkeys(reads)
        if not n.free.isdisjoint(keys) and meaning.category(n.value) is Category.CONTRACTION
    ]  # fmt: skip
