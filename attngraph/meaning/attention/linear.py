"""Attention without a softmax: sums of values weighted by the scores themselves.

    out = f[q] * sum over k of  (q . k) * v[k]        with k <= q, where it is causal

Without an exponential in between, the sum over keys can be taken first, at a cost linear in the tokens.
"""

from __future__ import annotations

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import DOT, WEIGHT
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.attention import dot as dots
from attngraph.meaning.attention.claim import Attention, write_claim
from attngraph.meaning.attention.normaliser import open_sums
from attngraph.meaning.attention.recogniser import Recogniser
from attngraph.meaning.attention.refusal import Refusal
from attngraph.meaning.attention.weighted_sums import KeyPart, WeightedSum, factors_of
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Unliftable

SUMS = ("aten.sum.dim_IntList",)


def is_root(meaning: Meaning, node: fx.Node) -> bool:
    """Whether the node may sum products of scores and values, or scores alone."""
    if node.op != "call_function" or not meaning.is_tensor(node):
        return False
    if meaning.category(node) is not Category.CONTRACTION and str(node.target) not in SUMS:
        return False
    return any(meaning.contracts(n) for n in node.all_input_nodes)


def examine(recogniser: Recogniser, node: fx.Node, ones: fx.Node | None) -> Attention | None:
    """The sum as an attention whose weights are the scores, or None if it is not one.

    Args:
        ones: a vector of ones as long as there are keys, for the values of a sum of scores alone.
    """
    meaning = recogniser.meaning
    try:
        output, at = meaning.places(node)
        lifted = meaning.lift(
            meaning.element(node, at), lambda r: _is_scores(recogniser, r.value), most=budgets.FORMULA_WORDS
        )
    except Unliftable:
        return None
    factors = factors_of(lifted)
    sums = [f for f in factors if f.op == "sum"]
    if len(sums) != 1:
        return None
    keys, body = open_sums(sums[0])
    body, causal = _unmasked(body)
    scores, values, fixed = _scores(meaning, factors_of(body), keys)
    if scores is None or len(keys) != 1:
        return None
    if not values and ones is not None:
        values = [E.read(ones, keys, "float")]
    found = dots.find_dot(meaning, scores, keys, values[0].free if len(values) == 1 else frozenset())
    if found is None or len(values) != 1 or values[0].op != "read":
        return None
    dot, spelled = found
    score = M.substitute(scores, spelled)
    if any(n is not DOT and n.op == "read" for n in E.walk(score)):
        return None
    outer = M.mul(*(f for f in factors if f is not sums[0]), *fixed)
    masked = score if causal is None else M.where(causal, score, E.NEG_INF)
    try:
        weight = dots.look_into(meaning, M.mul(WEIGHT, outer), keys, values[0].free, node.meta["val"].dtype)
        part = KeyPart(keys, masked, weight, values[0], (dot,))
        claim = write_claim(meaning, node, output, WeightedSum((part,)))
    except Unliftable:
        return None
    return None if isinstance(claim, Refusal) else claim


def _is_scores(recogniser: Recogniser, node: fx.Node) -> bool:
    """Whether to look through a node: it changes scores elementwise, or depends on positions alone."""
    meaning = recogniser.meaning
    changed = meaning.contracts(node) and meaning.category(node) in (Category.MOVEMENT, Category.POINTWISE)
    return changed or recogniser.is_index(node)


def _unmasked(body: Expr) -> tuple[Expr, Expr | None]:
    """A sum's body without the selection that leaves some keys out, and what it keeps."""
    factors = factors_of(body)
    for factor in factors:
        if factor.op != "where":
            continue
        condition, yes, no = factor.args
        rest = [f for f in factors if f is not factor]
        if E.is_const(no, 0):
            return M.mul(yes, *rest), condition
        if E.is_const(yes, 0):
            return M.mul(no, *rest), M.not_(condition)
    return body, None


def _scores(
    meaning: Meaning, factors: tuple[Expr, ...], keys: tuple[Expr, ...]
) -> tuple[Expr | None, list[Expr], list[Expr]]:
    """Of a body's factors: the scores, what else depends on the keys, and what does not."""
    scores: Expr | None = None
    values: list[Expr] = []
    fixed: list[Expr] = []
    for factor in factors:
        is_score = factor.op == "read" and meaning.category(factor.value) is Category.CONTRACTION
        if factor.free.isdisjoint(keys):
            fixed.append(factor)
        elif is_score and scores is None:
            scores = factor
        else:
            values.append(factor)
    return scores, values, fixed
