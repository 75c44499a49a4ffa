"""Scores that are made up of several products: equal ones become one, others become parts of the keys.

A product that the model computes tile by tile is many contractions in the graph, and one by its meaning:
`join_equal_products` compares the elements that they sum. Where a condition chooses between different
products, `split_by_product` takes the keys once for each, hidden where the condition chooses another:

    softmax of where(m, q.k, g.h)    =    one softmax over the keys k where m holds, and h where it does not

so that no product has to be computed as a whole. Nothing here looks at masks or values.

Weights without queries and keys are products of no width: averages over what a mask keeps, and softmaxes of a
table of biases.

    softmax of (0 where k <= q, else -inf)         the average of a token and all before it
    tril(ones) / its sum over each row             the same weights, written without an exponential
"""

import dataclasses
import math

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
    first: dict[Expr, tuple[Expr, float]] = {}
    named: dict[Expr, Expr] = {}
    for read in reads if len(reads) > 1 else ():
        opened = dots.open_product(meaning, read, keys)
        if opened is None:
            continue
        (q, of_q), (k, of_k) = opened.q[-1], opened.k[-1]
        whole, factor = M.totals(reversed(opened.inner), M.mul(q, k)), opened.factor * of_q * of_k
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
    varied = (n for n in E.reads(node) if not n.free.isdisjoint(keys))
    return [n for n in varied if meaning.category(n.value) is Category.CONTRACTION]


SUMS = ("aten.sum.dim_IntList", "aten.sum.default")
QUOTIENTS = ("aten.div.Tensor", "aten.mul.Tensor", "aten.true_divide.Tensor")


def has_no_product(part: KeyPart) -> bool:
    """Whether scores vary over query and key by positions and by tables smaller than the weights: those of
    the model, without one of the dimensions that values have besides the keys and their own width."""
    score, keys, value = part.score, frozenset(part.keys), part.value.free
    queries = score.free - value
    if not queries or score.free.isdisjoint(keys):
        return False
    over_pairs = (r for r in E.reads(score) if r.free & keys and r.free & queries)
    # The width of values is shared, and what a table is the same for.
    are_tables = all(r.value.op == "placeholder" and len(value - keys - r.free) > 1 for r in over_pairs)
    return are_tables and not any(n.op in E.BINDERS for n in E.walk(score))


def as_exponentials(node: Expr) -> Expr:
    """The expression with choices between zero and something, and between positive multiples of one thing, as
    products with an exponential."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op != "where" or current.kind == "bool":
            return M.construct(current, args)
        (one, of_one), (other, of_other) = map(_multiple, args[1:])
        rest = of_other if one == 0 else of_one
        same = of_one is of_other or 0 in (one, other)
        if not same or not all(0 <= n < math.inf for n in (one, other)) or one == other:
            return M.construct(current, args)
        return M.mul(rest, M.exp(M.where(args[0], _logarithm(one), _logarithm(other))))

    return E.rebuild(node, replace)


def _multiple(node: Expr) -> tuple[float, Expr]:
    """A number and what it multiplies."""
    if node.op != "const":
        return M.coefficient(node)
    return (math.nan if node is E.NAN else float(node.value)), E.ONE


def _logarithm(number: float) -> Expr:
    return E.NEG_INF if number == 0 else E.ZERO if number == 1 else E.const(math.log(number))


def adds_up(node: fx.Node) -> bool:
    """Whether a reduction is a sum, for weights that are never negative: or the mean of a few tensors that
    were stacked."""
    name, operand = str(node.target), str(getattr(node.args[0], "target", ""))
    is_norm = name.startswith("aten.linalg_vector_norm.") and node.args[1:2] == (1,)
    is_mean = name.startswith("aten.mean.") and operand.startswith(("aten.stack.", "aten.cat."))
    return "sum" in name or is_mean or is_norm


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds up tensors, which may be the results of parts of the keys."""
    return node.op == "call_function" and str(node.target).startswith("aten.add.")
