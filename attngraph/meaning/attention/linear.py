"""Attention without a softmax: sums of values weighted by the scores themselves.

    out = f[q] * sum over k of  (q . k) * v[k]        with k <= q, where it is causal

Without an exponential in between, the sum over keys can be taken first, at a cost linear in the tokens.
"""

import itertools
import operator
from collections.abc import Iterator, Set

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.language import WEIGHT, E, Expr
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M, open_sums
from attngraph.meaning.attention import dot as dots
from attngraph.meaning.attention.claim import Attention, write_claim
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.attention.recogniser import Recogniser
from attngraph.meaning.attention.weighted_sums import KeyPart, WeightedSum
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Unliftable

SUMS = ("aten.sum.dim_IntList",)


def is_root(meaning: Meaning, node: fx.Node) -> bool:
    """Whether the node may sum products of scores and values, or scores alone."""
    if node.op != "call_function" or not meaning.is_tensor(node):
        return False
    if meaning.category(node) is not Category.CONTRACTION and str(node.target) not in SUMS:
        return False

    def before(at: fx.Node) -> list[fx.Node]:
        is_product = at is not node and meaning.category(at) is Category.CONTRACTION
        return [] if is_product else [n for n in at.all_input_nodes if meaning.contracts(n)]

    # The contractions from which operands of the node are computed, and the operations on the way.
    between = itertools.islice(reached(before(node), before), budgets.SCORE_OPS + 1)
    return 0 < len(list(between)) <= budgets.SCORE_OPS


def has_softmax(meaning: Meaning, node: fx.Node) -> bool:
    """Whether exponentials lie between the sum and the contractions of its operands: then it is told of as a
    softmax."""

    def between(at: fx.Node) -> list[fx.Node]:
        return [n for n in at.all_input_nodes if meaning.category(n) not in (Category.CONTRACTION, None)]

    names = (str(at.target) for at in reached(between(node), between))
    return any(word in name for name in names for word in ("softmax", "exp.", "exp2."))


_SO = "so the sum over the keys cannot be taken first"
VARYING = (
    f"its scores are multiplied by something that depends on query and key together (a decay, say), {_SO}"
)
NOT_LINEAR = f"its weights are a function of the scores other than a multiple, {_SO}"


def examine(
    recogniser: Recogniser, node: fx.Node, ones: fx.Node | None, weights: Set[fx.Node]
) -> Attention | Refusal | None:
    """The sum as an attention whose weights are the scores, why it is none, or None where it does not look
    like one.

    Args:
        ones: a vector of ones as long as there are keys, for the values of a sum of scores alone.
        weights: the tensors that follow from the model's own tensors alone: products with these are layers.
    """
    meaning = recogniser.meaning
    try:
        output, at = meaning.places(node)
        own = meaning.element(node, at)
        if any(_is_layer(n, weights) for n in E.walk(own)):
            return None

        def through(read: Expr) -> bool:
            category = meaning.category(read.value)
            moves = category in (Category.MOVEMENT, Category.POINTWISE) and meaning.contracts(read.value)
            return moves or recogniser.is_index(read.value)

        lifted = meaning.lift(own, through, most=budgets.FORMULA_WORDS)
    except Unliftable:
        return None
    factors = E.parts(lifted, "mul")
    sums = [f for f in factors if f.op == "sum"]
    if len(sums) != 1:
        return None
    keys, body = open_sums(sums[0])
    if len(keys) != 1:
        return None
    body, causal = _unmasked(body)
    fixed = [f for f in E.parts(body, "mul") if f.free.isdisjoint(keys)]
    moving = [f for f in E.parts(body, "mul") if not f.free.isdisjoint(keys)]
    outer = M.mul(*(f for f in factors if f is not sums[0]), *fixed)
    refused: Refusal | None = None
    # Where values are a product too, either factor may be the scores: rather not one that is a layer.
    ways = list(_ways(meaning, moving, keys, ones))
    layers = [any(side[-1][0].value in weights for side in (dot.q, dot.k)) for _, _, _, (dot, _) in ways]
    ordered = sorted(zip(layers, ways, strict=True), key=operator.itemgetter(0))
    for layer, (scores, values, of_value, (dot, spelled)) in ordered:
        score, is_product = M.substitute(scores, spelled), _is_product(meaning, scores)
        if not is_product or len(values) != 1 or values[0].op != "read":
            if not layer and dot.q[0][0].free - set(dot.inner):
                refused = Refusal(VARYING if is_product and scores not in values else NOT_LINEAR)
            continue
        if E.reads(score):
            continue
        masked = score if causal is None else M.where(causal, score, E.NEG_INF)
        try:
            weight = dots.look_into(meaning, M.mul(WEIGHT, outer), keys, of_value, node.meta["val"].dtype)
            part = KeyPart(keys, masked, weight, values[0], (dot,))
            claim = write_claim(meaning, node, output, WeightedSum((part,)))
        except Unliftable:
            continue
        if isinstance(claim, Attention):
            return claim
    return refused


def _is_layer(node: Expr, weights: Set[fx.Node]) -> bool:
    """Whether it is a sum over the places of a tensor that follows from the model's own tensors alone."""
    reads = (n for n in E.reads(node) if n.value in weights) if node.op == "sum" else ()
    return any(node.args[0] in read.free for read in reads)


def _ways(
    meaning: Meaning, moving: list[Expr], keys: tuple[Expr, ...], ones: fx.Node | None
) -> Iterator[tuple[Expr, list[Expr], frozenset[Expr], tuple[dots.Dot, dots.Spelled]]]:
    """The factors that may be scores, each with the others as values, their variables, and its dot."""
    for place, scores in enumerate(moving):
        values = [*moving[:place], *moving[place + 1 :]]
        if not values and ones is not None:
            values = [E.read(ones, keys, "float")]
        of_value = values[0].free if len(values) == 1 else frozenset[Expr]()
        opened = dots.find_dot(meaning, scores, keys, of_value)
        if opened is not None and values:
            yield scores, values, of_value, opened


def _is_product(meaning: Meaning, scores: Expr) -> bool:
    """Whether scores are an element of a contraction as it is."""
    return scores.op == "read" and meaning.category(scores.value) is Category.CONTRACTION


def _unmasked(body: Expr) -> tuple[Expr, Expr | None]:
    """A sum's body without the selection that leaves some keys out, and what it keeps."""
    factors = E.parts(body, "mul")
    for factor in (f for f in factors if f.op == "where"):
        condition, yes, no = factor.args
        if E.is_const(yes, 0):
            condition, yes, no = M.not_(condition), no, yes
        if E.is_const(no, 0):
            return M.mul(yes, *(f for f in factors if f is not factor)), condition
    return body, None
