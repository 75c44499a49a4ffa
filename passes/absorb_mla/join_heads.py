"""Keys or values that were projected head by head, as one projection for all heads. Used by `absorb_mla`.

A loop over heads projects one tensor by a weight for each head, and `merge_heads` concatenates the results.
A concatenation of projections of one tensor is its projection by the concatenated weights, which is what a
latent is recognised by. Parts of the width that all heads share (a rotary key) are expanded instead. The
weights are concatenated in the stage that runs when a weight changes. Nothing is done where the heads'
projections differ in form, or are computed from different tensors.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.language import E, Expr
from attngraph.ir.ops.nodes import Attention
from attngraph.ir.walk import reached
from attngraph.meaning import M, Meaning
from attngraph.meaning.attention import layout
from attngraph.meaning.attention.latent import pieces
from attngraph.meaning.check.region import region
from attngraph.passes.build import Builder, Refused
from attngraph.passes.merge_heads import same_value
from attngraph.passes.proposal import Proposal

aten = torch.ops.aten
_WEIGHT_AXIS: dict[Any, int] = {aten.linear.default: 0, aten.matmul.default: 1, aten.mm.default: 1}
"""The axis of a projection's weight along which its results lie."""
_WEIGHTS = ("parameter", "buffer", "constant")
_APART = "the heads' operands are no projections that can be joined"


def join_heads(proposal: Proposal, meaning: Meaning, node: fx.Node) -> tuple[fx.Node, ...]:
    """Write an attention's keys and values as projections for all heads, where `merge_heads` concatenated
    them, as a part of a proposal. Returns the concatenations of weights; none, and nothing is done, where
    they are not of that form."""
    view, args = Attention.of(node), node.args
    with proposal.attempt() as attempt:
        join = _Join(attempt, meaning)
        k, v = (join.operand(x) if x.target is aten.cat.default else x for x in (view.k, view.v))
        for old, new in ((view.k, k), (view.v, v)):
            if old is not new:
                attempt.check(old, new, join.sources)
        if not join.weights:
            raise Refused(_APART)
        attempt.undo_by(lambda: setattr(node, "args", args))
        node.args = view.replace(k=k, v=v).args
    return () if attempt.problem else tuple(join.weights)


class _Join:
    def __init__(self, builder: Builder, meaning: Meaning) -> None:
        self.graph, self.meaning, self.builder = builder.graph, meaning, builder
        self.weights: list[fx.Node] = []
        self.sources: list[fx.Node] = []
        self._pairs: dict[tuple[fx.Node, fx.Node], bool] = {}

    def operand(self, cat: fx.Node) -> fx.Node:
        """`[B, H, S, n]` for a concatenation of tensors `[B, 1, S, n]` along dimension 1; Refused where they
        are no such tensors, or no projections of one tensor."""
        heads: list[fx.Node] = list(cat.args[0])  # type: ignore[arg-type]
        b, one, s, n = self.meaning.shape(heads[0])
        if cat.args[1] != 1 or not E.is_const(one, 1) or n.op != "const":
            raise Refused(_APART)
        at = E.var("b", b), E.ZERO, E.var("s", s), E.var("d", n)
        columns = [self._stretches(head, at) for head in heads]
        if len({tuple((inner.args[0], start) for _, inner, start in column) for column in columns}) > 1:
            raise Refused(_APART)
        parts = []
        for same in zip(*columns, strict=True):
            reads, inner = [read for read, _, _ in same], same[0][1]
            parts.append(self._part(reads, (at[0], at[2], inner)))
        return self.builder.side_by_side(parts, -1)

    def _stretches(self, head: fx.Node, at: tuple[Expr, ...]) -> list[tuple[Expr, Expr, int]]:
        """The tensors that a head's width is made of, as `pieces` gives them, seen through views."""
        moved = self.meaning.moved_from
        found = pieces(moved(self.meaning.read(head, at)), at[3])
        return [(moved(read), inner, start) for read, inner, start in found]

    def _part(self, reads: Sequence[Expr], at: tuple[Expr, Expr, Expr]) -> fx.Node:
        """`[B, H, S, n]` from an element of each head at (b, s, d)."""
        b, s, d = at
        head = E.var("h", E.const(len(reads)))
        read = reads[0]
        if not all(r.op == read.op == "read" and self._same(r.value, read.value) for r in reads):
            if any(r.op != "read" or r.args != read.args for r in reads) or read.args[-1] is not d:
                raise Refused(_APART)
            joined = self._projection([r.value for r in reads])
            place = M.add(M.mul(head, self.meaning.shape(read.value)[-1]), d)
            read = E.read(joined, (*read.args[:-1], place), read.kind)
        elif any(r.args != read.args for r in reads):
            raise Refused(_APART)
        else:
            self._computed_from([r.value for r in reads])
        varied = tuple(() if E.is_const(v.args[0], 1) else (v,) for v in (b, head, s, d))
        steps = layout.solve(self.meaning.shape(read.value), read.args, varied)
        return self.builder.view(read.value, steps)

    def _same(self, a: object, b: object) -> bool:
        return same_value(a, b, lambda n: self.meaning.category(n) is not None, self._pairs)

    def _computed_from(self, nodes: Sequence[fx.Node]) -> None:
        """Add the values that equal computations begin with to the sources."""

        def operands(pair: tuple[fx.Node, fx.Node]) -> Iterable[tuple[fx.Node, fx.Node]]:
            a, b = pair
            return () if a is b else zip(a.all_input_nodes, b.all_input_nodes, strict=True)

        pairs = reached([(nodes[0], other) for other in nodes[1:]], operands)
        self.sources += [a for a, b in pairs if a is b]

    def _projection(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """One projection, by the concatenated weights, in place of one for each head."""
        first = nodes[0]
        axis = _WEIGHT_AXIS.get(first.target)
        alike = len({(n.target, len(n.args), *n.kwargs) for n in nodes}) == 1 and not first.kwargs
        if axis is None or not alike or not all(self._same(n.args[0], first.args[0]) for n in nodes):
            raise Refused(_APART)
        operands = [[n.args[place] for n in nodes] for place in range(1, len(first.args))]
        joined = [None if all(w is None for w in own) else self._weights(own, axis) for own in operands]
        self._computed_from([n.args[0] for n in nodes])  # type: ignore[misc]
        return self.builder.call(first.target, first.args[0], *joined)

    def _weights(self, own: Sequence[object], axis: int) -> fx.Node:
        weights = [w for w in own if isinstance(w, fx.Node)]
        known = self.graph.given()
        kinds = {known[n].kind for n in region(weights, ()) if n.op == "placeholder"}
        ranks = {len(w.meta["val"].shape) for w in weights}
        if len(weights) < len(own) or not kinds <= {*_WEIGHTS} or not ranks <= {1, 2}:
            raise Refused(_APART)
        self.sources += weights
        self.weights.append(self.builder.call(aten.cat.default, weights, axis if ranks == {2} else 0))
        return self.weights[-1]
