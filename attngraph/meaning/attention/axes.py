"""Heads, or another axis of what the model was given? A model that attends along the rows of a map attends in
each row apart, and its kernel does not care whether there are several heads or several rows. A reader does.

What makes heads is a product with a weight of each head. A digit is another axis where in each of queries,
keys and values that depend on it, it is a dimension of what is multiplied with a weight, and of no weight.
Heads that are cut from the features before they are multiplied (`[B, S, H, D] @ [D, D]`) share a dimension
with the features that the product sums, and stay heads. Where nothing is known, digits are heads. Only the
report uses this.
"""

import contextlib
from collections.abc import Iterable, Iterator

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra.digits import Digits
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Unliftable

_MOST_WORDS = 200
"""Most words of an operand's formula that is looked at."""


def other_axes(meaning: Meaning, heads: Digits, tokens: Digits, operands: Iterable[Expr]) -> Digits:
    """Those of `heads` that are another axis. `tokens` are the digits of batch, queries and keys; `operands`
    are elements of queries, keys and values, in terms of these digits."""
    possible, found = frozenset(heads), frozenset[Expr]()
    for operand in operands:
        wanted = possible & operand.free
        if wanted:
            axes = _axes_of(meaning, operand, wanted, frozenset(tokens))
            possible, found = possible - (wanted - axes), found | axes
    return tuple(d for d in heads if d in possible & found)


def _axes_of(
    meaning: Meaning, operand: Expr, wanted: frozenset[Expr], tokens: frozenset[Expr]
) -> frozenset[Expr]:
    """Those of the wanted digits that are an axis of what one operand is projected from."""
    try:
        lifted = meaning.elementwise(operand, most=_MOST_WORDS)
    except Unliftable:
        return frozenset()
    along: frozenset[Expr] = frozenset()
    weighted: frozenset[Expr] = frozenset()
    for read in _reads(lifted):
        products = list(_products(meaning, read))
        if not products and not read.free & tokens:
            weighted |= read.free  # a bias, or a factor of each head
        for source, inner in products:
            if not source.free & tokens:
                weighted |= source.free
                continue
            places = _places(meaning, source)
            along |= frozenset().union(*(p.free for p in places if inner not in p.free))
            weighted |= frozenset().union(*(p.free for p in places if inner in p.free))
    return wanted & along - weighted


def _products(meaning: Meaning, read: Expr) -> Iterator[tuple[Expr, Expr]]:
    """The factors of a contraction's element, each with the variable that is summed."""
    if meaning.category(read.value) is not Category.CONTRACTION:
        return
    with contextlib.suppress(Unliftable):
        for node in E.walk(meaning.element(read.value, read.args)):
            if node.op == "sum":
                yield from ((factor, node.args[0]) for factor in _reads(node.args[1]))


def _places(meaning: Meaning, source: Expr) -> list[Expr]:
    """The indices of what is projected, in the tensor that it is a view of."""
    with contextlib.suppress(Unliftable):
        source = meaning.lift(source, lambda read: meaning.category(read.value) is Category.MOVEMENT)
    return [place for read in _reads(source) for place in read.args]


def _reads(formula: Expr) -> list[Expr]:
    return [node for node in E.walk(formula) if node.op == "read"]
