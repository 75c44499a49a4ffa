"""Attention whose keys come in parts: one softmax over several products, each part with values of its own.

    out = sum over g of  p[g] * u[g]  +  sum over x of  p[G + x] * v[x]

where p is the softmax of all G + X scores (global tokens and a block, as in Pegasus-X; a prefix and the text;
kept keys and new ones). That is one attention over joined keys and joined values. `attention.py` finds the
parts; here it is shown that they share one softmax and cover it, and the claim is written. A part is never
taken for an attention by itself: its weights do not add up to one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from torch import fx

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import DOT
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.digits import Digits, extent, split_digits
from attngraph.meaning.algebra.digits import joined as digits_joined
from attngraph.meaning.attention import layout, roles, weighted_sums
from attngraph.meaning.attention.claim import (
    Attention,
    Operand,
    View,
    Views,
    beside_keys,
    program_indices,
    write,
)
from attngraph.meaning.attention.dot import Dot
from attngraph.meaning.attention.weighted_sums import Look, Refusal, WeightedSum
from attngraph.meaning.element import Meaning


@dataclasses.dataclass(frozen=True)
class Piece:
    """One part: its key variable, its product, its score and weight, and the chain of its values."""

    key: Expr
    dot: Dot
    score: Expr
    weight: Expr
    value: tuple[tuple[Expr, float], ...]


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds up what the parts may have given."""
    return node.op == "call_function" and str(node.target).startswith("aten.add.")


def weighted_parts(meaning: Expr, look: Look) -> tuple[WeightedSum, ...] | None:
    """The terms of a sum as parts of one softmax, in the order of its keys; None where they do not share one
    softmax, or do not cover it."""
    if meaning.op != "add":
        return None
    taken = [weighted_sums.numerator(term) for term in meaning.args]
    found = [t for t in taken if t is not None and len(t.keys) == 1]
    if len(found) != len(taken) or len({M.canonical_binders(t.inverse) for t in found}) != 1:
        return None
    whole = found[0].inverse.args[0]
    pieces = weighted_sums.pieces_of(whole.args if whole.op == "add" else (whole,), look, 0)
    ordered: list[WeightedSum] = []
    for piece in pieces:
        matching = [t for t in found if weighted_sums.is_normaliser(piece, t, look)]
        part = matching[0].split() if len(matching) == 1 else None
        if not isinstance(part, WeightedSum) or any(part.keys == other.keys for other in ordered):
            return None
        ordered.append(part)
    return tuple(ordered) if len(ordered) == len(found) else None


def claim(
    meaning: Meaning, node: fx.Node, output: tuple[Expr, ...], pieces: Sequence[Piece]
) -> Attention | Refusal | None:
    """The parts as one attention; None where their products are not of the same queries."""
    first = pieces[0].dot
    pieces = [_with_inner(piece, first.inner) for piece in pieces]
    queries = first.q[-1][0]
    if any(p.dot.q[-1][0] is not queries for p in pieces):
        return None
    starts = [E.ZERO, *itertools.accumulate((p.key.args[0] for p in pieces), M.add)]
    key = E.var("joined", starts.pop())
    places = {p.key: key for p in pieces}
    ks, vs = [p.dot.k[-1][0] for p in pieces], [p.value[-1][0] for p in pieces]
    digits = split_digits((*output, *first.inner), [a for read in (queries, *ks, *vs) for a in read.args])
    digits = digits or {}
    cut = {variable: digits_joined(found) for variable, found in digits.items()}

    def digits_of(variable: Expr) -> Digits:
        return () if E.is_const(variable.args[0], 1) else digits.get(variable, (variable,))

    def free(reads: Sequence[Expr]) -> frozenset[Expr]:
        return frozenset().union(*(M.substitute(r, cut | places).free for r in reads))

    scores = [M.substitute(_at(p, key, start, p.score), cut) for p, start in zip(pieces, starts, strict=True)]
    weights = [M.substitute(_at(p, key, s, p.weight), cut) for p, s in zip(pieces, starts, strict=True)]
    dimensions = tuple(digits_of(o) for o in output)
    inner = tuple(d for i in first.inner for d in digits_of(i))
    assigned = roles.assign(
        dimensions, (key,), inner, q=free([queries]), k=free(ks), v=free(vs),
        scores=frozenset().union(*(x.free for x in (*scores, *weights))),
        beside_keys=frozenset().union(*(beside_keys(s, (key,), {}) for s in scores)),
    )  # fmt: skip
    if isinstance(assigned, Refusal):
        return assigned
    views = Views(meaning, assigned, cut)
    try:
        side_q = views.operand(first.q, assigned.heads, assigned.queries, inner)
        sides_k = [views.operand(p.dot.k, assigned.kv_heads, (p.key,), inner) for p in pieces]
        sides_v = [views.operand(p.value, assigned.kv_heads, (p.key,), assigned.values) for p in pieces]
    except layout.NoView:
        return Refusal("an operand is no view of a tensor of the model")
    factors = [E.const(side_q.factor * k.factor) for k in sides_k]
    scores = [M.substitute(s, {DOT: M.mul(f, DOT)}) for s, f in zip(scores, factors, strict=True)]
    weights = [M.mul(E.const(v.factor), w) for v, w in zip(sides_v, weights, strict=True)]
    return write(
        node, tuple(p.dot.node for p in pieces if p.dot.node is not None),
        (Operand((_plain(side_q),)), _joined(sides_k), _joined(sides_v)), assigned,
        program_indices(assigned, cut), (_chosen(key, starts, scores), _chosen(key, starts, weights), None),
        tuple(views.output(dimensions, output)), extent(inner),
    )  # fmt: skip


def _with_inner(piece: Piece, inner: tuple[Expr, ...]) -> Piece:
    """The piece with its product summed over these variables, where their extents are the same."""
    own = piece.dot.inner
    if [i.args for i in own] != [i.args for i in inner]:
        return piece
    names = dict(zip(own, inner, strict=True))
    q, k = (tuple((M.substitute(r, names), f) for r, f in side) for side in (piece.dot.q, piece.dot.k))
    return dataclasses.replace(piece, dot=dataclasses.replace(piece.dot, inner=inner, q=q, k=k))


def _at(piece: Piece, key: Expr, start: Expr, formula: Expr) -> Expr:
    """A formula of the piece's key in terms of the joined one."""
    return M.substitute(formula, {piece.key: M.sub(key, start)})


def _chosen(key: Expr, starts: Sequence[Expr], formulas: Sequence[Expr]) -> Expr:
    """The formula of the piece that the key lies in: what all pieces add, and what each adds of its own."""
    terms = [f.args if f.op == "add" else (f,) for f in formulas]
    common = [t for t in terms[0] if all(t in others for others in terms)]
    own = [M.add(*(t for t in found if t not in common)) for found in terms]
    found = own[-1]
    for start, formula in zip(reversed(starts[1:]), reversed(own[:-1]), strict=True):
        if formula is not found:
            found = M.where(M.lt(key, start), formula, found)
    return M.add(*common, found)


def _plain(view: View) -> View:
    return dataclasses.replace(view, factor=1.0)


def _joined(views: Sequence[View]) -> Operand:
    return Operand(tuple(map(_plain, views)), along=-2)
