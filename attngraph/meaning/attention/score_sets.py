"""Scores that are made up of several products: equal ones become one, others become parts of the keys.

A product that the model computes tile by tile is many contractions in the graph, and one by its meaning:
`join_equal_products` compares the elements that they sum. Where a condition chooses between different
products, `split_by_product` takes the keys once for each, hidden where the condition chooses another:

    softmax of where(m, q.k, g.h)    =    one softmax over the keys k where m holds, and h where it does not

so that no product has to be computed as a whole. Nothing here looks at masks or values.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.attention import dot as dots
from attngraph.meaning.attention.weighted_sums import KeyPart
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category


def join_equal_products(meaning: Meaning, score: Expr, keys: tuple[Expr, ...]) -> Expr:
    """The score with one name for all products that sum the same elements, up to a number."""
    reads = _products(meaning, score, keys)
    if len(reads) < 2:
        return score
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
    return M.substitute(score, named) if named else score


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
            scores = (M.substitute(part.score, {node: branch}) for branch in branches)
            shown = (condition, M.not_(condition))
            return [
                piece
                for kept, score in zip(shown, scores, strict=True)
                for piece in _split(meaning, dataclasses.replace(part, score=M.where(kept, score, E.NEG_INF)))
            ]
    return [part]


def _products(meaning: Meaning, node: Expr, keys: tuple[Expr, ...]) -> list[Expr]:
    """The reads of contractions that vary over the keys."""
    reads = (n for n in E.walk(node) if n.op == "read" and isinstance(n.value, fx.Node))
    return [
        n for n in dict.fromkeys(reads)
        if not n.free.isdisjoint(keys) and meaning.category(n.value) is Category.CONTRACTION
    ]  # fmt: skip
