"""The recogniser: is this node an attention, and if so which?

There is one, and it knows no spellings. It asks for the meaning of one element of a node that sums
products (`meaning/element.py`), takes that apart into weights and values (`weighted_sums.py`), finds
the dot inside the scores (`dot.py`), gives every index variable its role (`roles.py`), and writes
what is left as a score program (`program.py`). What it returns is a claim; the pass that uses it
checks the claim in float64 before anything is replaced (`meaning/check/check.py`).
"""

from __future__ import annotations

import dataclasses

from torch import fx

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import DOT
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.digits import Digits, extent, split_digits
from attngraph.meaning.algebra.digits import joined as digits_joined
from attngraph.meaning.attention import dot as dots
from attngraph.meaning.attention import key_parts as joined_keys
from attngraph.meaning.attention import layout, roles, weighted_sums
from attngraph.meaning.attention.claim import (
    Attention,
    Operand,
    Views,
    beside_keys,
    divisors,
    in_order,
    program_indices,
    side_by_side,
    write,
)  # fmt: skip
from attngraph.meaning.attention.weighted_sums import Refusal, Unnormalised
from attngraph.meaning.element import MOST_WORDS, Meaning, is_part
from attngraph.meaning.rule import Category, TooLong, Unliftable
from attngraph.meaning.rules.reduction import LOG_SOFTMAX, SOFTMAX

SOFTMAX_LIKE = frozenset(f"aten.{n}" for n in (*SOFTMAX, "scaled_dot_product_attention.default"))
_EXPONENTIALS = SOFTMAX_LIKE | {
    f"aten.{n}" for n in (*LOG_SOFTMAX, "exp.default", "exp2.default", "logsumexp.default", "pow.Scalar")
}
_ROOTS = ("aten.mul.", "aten.div.", "aten.true_divide.", "aten.einsum.")


def _is_mean_of_stack(node: fx.Node) -> bool:
    """Whether a node is the mean of tensors that were stacked: a sum of a few."""
    stack = node.args[0]
    is_mean = str(node.target).startswith("aten.mean.") and isinstance(stack, fx.Node)
    return is_mean and str(stack.target).startswith(("aten.stack.", "aten.cat."))  # type: ignore[union-attr]


class Recogniser:
    """Recognition over one graph. Nodes must be asked about in the graph's order."""

    def __init__(self, meaning: Meaning, gradients: bool) -> None:
        self.meaning = meaning
        self.gradients = gradients
        self._indices: dict[fx.Node, bool] = {}
        self._roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self._near: dict[fx.Node, frozenset[fx.Node]] = {}
        self.unnormalised: set[fx.Node] = set()
        self._too_long: set[fx.Node] = set()
        self._parts: dict[fx.Node, frozenset[fx.Node]] = {}

    def near(self, node: fx.Node) -> frozenset[fx.Node]:
        """The exponentials that this node's elements are computed from, without a contraction or
        an opaque op in between."""
        if node not in self._near:
            self._near[node] = self._find_near(node)
        return self._near[node]

    def _find_near(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.op != "call_function":
            return frozenset()
        if str(node.target) in _EXPONENTIALS:
            return frozenset(() if self.is_index(node) else (node,))
        category = self.meaning.category(node)
        if category is None and not is_part(node):
            return frozenset()
        if category is Category.CONTRACTION and node not in self.unnormalised:
            return frozenset()
        if category is Category.REDUCTION and not ("sum" in str(node.target) or _is_mean_of_stack(node)):
            return frozenset()
        found = frozenset().union(*(self.near(n) for n in node.all_input_nodes))
        if not self._too_long.isdisjoint(node.all_input_nodes):
            self._too_long.add(node)
            return frozenset()
        return found

    def is_index(self, node: fx.Node) -> bool:
        """Whether a node is computed from indices alone, as ALiBi's slopes are."""
        if node not in self._indices:
            category = self.meaning.category(node)
            elementwise = (Category.MOVEMENT, Category.POINTWISE, Category.INDEX)
            self._indices[node] = category in elementwise and all(
                self.is_index(n) for n in node.all_input_nodes if self.meaning.is_tensor(n)
            )
        return self._indices[node]

    def examine(self, node: fx.Node) -> tuple[Attention, ...] | Refusal | None:
        """The attentions whose sum this node is, mostly one; None where nothing about it looks like
        attention."""
        joins = joined_keys.is_sum(node) and len(self._parts_below(node)) > 1
        if not joins and not self._is_root(node):
            return None
        try:
            found = self._examine_parts(node) if joins else self._examine(node)
        except TooLong as problem:
            softmaxes = [n for n in self.exponentials(node) if str(n.target) in SOFTMAX_LIKE]
            self._near[node] = frozenset()
            self._too_long.add(node)  # what is computed from it, element by element, is longer still
            return Refusal(str(problem)) if softmaxes else None
        except Unliftable as problem:
            found = Refusal(str(problem))
        if isinstance(found, (Refusal, tuple)) and not joins:
            self._parts[node] = frozenset((node,))
        if isinstance(found, Refusal) and self.meaning.obstacles:
            return dataclasses.replace(found, sizes=found.sizes | self.meaning.obstacles)
        if isinstance(found, Unnormalised):
            self.unnormalised.add(node)
            self._near.pop(node, None)
            return None
        return found

    def exponentials(self, node: fx.Node) -> frozenset[fx.Node]:
        """The exponentials that weigh the sum of `node`, or its parts."""
        if str(node.target) in SOFTMAX_LIKE:
            return frozenset((node,))
        places = [node]
        if joined_keys.is_sum(node) or self.is_product(node):
            places += frozenset().union(*map(self._parts_below, node.all_input_nodes))
        return frozenset().union(*(self.near(n) for place in places for n in place.all_input_nodes))

    def _parts_below(self, node: fx.Node) -> frozenset[fx.Node]:
        """Sums weighted by exponentials, none an attention by itself, that this node moves or adds up."""
        if node not in self._parts:
            moves = self.meaning.category(node) is Category.MOVEMENT or joined_keys.is_sum(node)
            below = node.all_input_nodes if moves else ()
            self._parts[node] = frozenset().union(*map(self._parts_below, below))
        return self._parts[node]

    def is_product(self, node: fx.Node) -> bool:
        """Whether a node multiplies, element by element or more."""
        return node.op == "call_function" and str(node.target).startswith(_ROOTS)

    def _is_root(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not self.meaning.is_tensor(node):
            return False
        if str(node.target) == "aten.scaled_dot_product_attention.default":
            return True
        category = self.meaning.category(node)
        may_be = (
            category is Category.CONTRACTION
            or self.is_product(node)
            or str(node.target).startswith("aten.sum.")
        )
        return may_be and any(self.near(n) for n in node.all_input_nodes)

    def _examine(self, node: fx.Node) -> tuple[Attention, ...] | Refusal | Unnormalised | None:
        meaning = self.meaning
        output, at = meaning.places(node)
        # A factor of the result may hold what the weights were divided by: then both are looked into.
        gated = self.is_product(node)
        lifted = meaning.lift(
            meaning.element(node, at),
            lambda r: bool(self.near(r.value) or (gated and self._parts_below(r.value))),
            most=MOST_WORDS,
        )
        sums = weighted_sums.weighted_sums(lifted, meaning.elementwise)
        if not isinstance(sums, tuple):
            return sums
        found: list[Attention] = []
        for parts in sums:
            claim = self._claim_sum(node, output, parts)
            if isinstance(claim, Refusal):
                return claim
            found.append(claim)
        return tuple(found)

    def _claim_sum(
        self, node: fx.Node, output: tuple[Expr, ...], parts: weighted_sums.WeightedSum
    ) -> Attention | Refusal:
        """The claim for one sum weighed by one softmax."""
        meaning = self.meaning
        score = dots.look_into(meaning, parts.score, parts.keys, parts.value.free, node.meta["val"].dtype)
        score = dots.one_name(score)
        # What is the same for all keys (a subtracted maximum) changes no weight; a sink feels it.
        score, shift = weighted_sums.split_by(score, parts.keys)
        if self.gradients and not self._sources(shift) <= self._sources(M.mul(M.number(score), parts.value)):
            score = M.add(score, shift)  # its gradient is zero, but somebody may ask for it
        elif parts.sink is not None:
            parts = dataclasses.replace(parts, sink=M.sub(parts.sink, shift))
        found = dots.find_dot(meaning, score, parts.keys, parts.value.free)
        found = found or dots.dot_of_width_one(
            score, parts.keys, parts.value.free, parts.value.value.meta["val"].dtype
        )
        if found is None:
            return Refusal(dots.why_no_dot(meaning, score, parts.keys, node.meta["val"].dtype))
        dot, score = found
        # What a contraction adds by itself (baddbmm's bias) has not been looked into yet.
        score = dots.look_into(meaning, score, parts.keys, parts.value.free, node.meta["val"].dtype)
        if any(n.op == "read" and n.value is dot.node for n in E.walk(score)):
            return Refusal(
                "its scores are also used at other places than their own, so they are needed anyway"
            )
        claim = self.claim(node, output, parts, dot, score)
        joined: tuple[tuple[dots.Dot, float], ...] = ()
        while True:
            for other, factor, rest in dots.other_dots(meaning, score, parts.keys):
                if not self._may_join(other, dot, parts):
                    continue
                wider = self.claim(node, output, parts, dot, rest, (*joined, (other, factor)))
                if isinstance(wider, Attention):
                    claim, score, joined = wider, rest, (*joined, (other, factor))
                    break
            else:
                return claim

    def _examine_parts(self, node: fx.Node) -> tuple[Attention, ...] | Refusal | None:
        """Attention whose keys come in parts that the model multiplies separately."""
        meaning, dtype = self.meaning, node.meta["val"].dtype
        output, at = meaning.places(node)
        lifted = meaning.lift(
            meaning.element(node, at),
            lambda r: bool(self._parts_below(r.value) or self.near(r.value)),
            most=MOST_WORDS,
        )
        parts = joined_keys.weighted_parts(lifted, meaning.elementwise)
        if parts is None:
            return None
        pieces: list[joined_keys.Piece] = []
        for part in parts:
            of_value = part.value.free
            score = dots.look_into(meaning, part.score, part.keys, of_value, dtype)
            found = dots.find_dot(meaning, score, part.keys, of_value)
            if found is None:
                return None
            weight = dots.look_into(meaning, part.weight, part.keys, of_value, dtype)
            score = dots.look_into(meaning, found[1], part.keys, of_value, dtype)
            pieces.append(
                joined_keys.Piece(part.keys[0], found[0], score, weight, dots.chain(meaning, part.value))
            )
        claim = joined_keys.claim(meaning, node, output, pieces)
        return (claim,) if isinstance(claim, Attention) else claim

    def _may_join(self, other: dots.Dot, dot: dots.Dot, parts: weighted_sums.WeightedSum) -> bool:
        """Whether a second product can be a part of the dot: its key side is one of keys, no table of
        distances."""
        of_keys = dot.k[0][0].free | parts.value.free | set(parts.keys)
        return other.k[0][0].free <= of_keys | set(other.inner)

    def _sources(self, node: Expr) -> frozenset[fx.Node]:
        """The floating inputs of the graph that an expression is computed from."""
        reads = [n.value for n in E.walk(node) if n.op == "read"]
        return frozenset().union(*map(self._sources_of, reads))

    def _sources_of(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.op == "placeholder":
            return frozenset((node,) if node.meta["val"].is_floating_point() else ())
        if node not in self._roots:
            self._roots[node] = frozenset().union(*map(self._sources_of, node.all_input_nodes))
        return self._roots[node]

    def claim(
        self,
        node: fx.Node,
        output: tuple[Expr, ...],
        parts: weighted_sums.WeightedSum,
        dot: dots.Dot,
        score: Expr,
        joined: tuple[tuple[dots.Dot, float], ...] = (),
    ) -> Attention | Refusal:
        """The claim that is left to write down once the dot is known. `joined`: products that are added to
        it, each with the factor that makes it a part of the dot."""
        meaning = self.meaning
        of_value = parts.value.free
        dtype = node.meta["val"].dtype
        weight = dots.look_into(meaning, parts.weight, parts.keys, of_value, dtype)
        sink = parts.sink and dots.look_into(meaning, parts.sink, parts.keys, of_value, dtype)
        values = dots.chain(meaning, parts.value)
        parts = dataclasses.replace(parts, keys=in_order(parts.keys, dot.k[0][0]))
        # Where an operand is deepest a view of something, variables may appear divided: cut them.
        products = (dot, *(other for other, _ in joined))
        qs, ks, v = [d.q[-1][0] for d in products], [d.k[-1][0] for d in products], values[-1][0]
        variables = [*output, *parts.keys, *(i for d in products for i in d.inner)]
        digits = split_digits(variables, [a for read in (*qs, *ks, v) for a in read.args])
        if digits is None:
            digits = {}
        cut = {variable: digits_joined(found) for variable, found in digits.items()}

        def digits_of(variable: Expr) -> Digits:
            if E.is_const(variable.args[0], 1):
                return ()
            return digits.get(variable, (variable,))

        assigned = roles.assign(
            tuple(digits_of(o) for o in output),
            tuple(d for key in parts.keys for d in digits_of(key)),
            tuple(d for product in products for i in product.inner for d in digits_of(i)),
            q=frozenset().union(*(M.substitute(q, cut).free for q in qs)),
            k=frozenset().union(*(M.substitute(k, cut).free for k in ks)),
            v=M.substitute(v, cut).free,
            scores=M.substitute(M.mul(M.number(score), weight), cut).free,
            beside_keys=beside_keys(M.substitute(score, cut), parts.keys, digits),
        )
        if isinstance(assigned, Refusal):
            return assigned
        views = Views(meaning, assigned, cut)
        inners = [tuple(d for i in product.inner for d in digits_of(i)) for product in products]
        try:
            sides_q = [
                views.operand(p.q, assigned.heads, assigned.queries, i)
                for p, i in zip(products, inners, strict=True)
            ]
            sides_k = [
                views.operand(p.k, assigned.kv_heads, assigned.keys, i)
                for p, i in zip(products, inners, strict=True)
            ]
            side_v = views.operand(values, assigned.kv_heads, assigned.keys, assigned.values)
        except layout.NoView:
            return Refusal("an operand is no view of a tensor of the model", divisors((*qs, *ks, v)))
        operand_q, operand_k, factor = side_by_side(sides_q, sides_k, [1.0, *(f for _, f in joined)])
        scaled = M.mul(E.const(factor), DOT) if factor != 1 else DOT
        if side_v.factor != 1:
            weight = M.mul(E.const(side_v.factor), weight)
        operand_v = Operand((dataclasses.replace(side_v, factor=1.0),))
        return write(
            node, tuple(d.node for d in products if d.node is not None), (operand_q, operand_k, operand_v),
            assigned, program_indices(assigned, cut), (M.substitute(score, {DOT: scaled}), weight, sink),
            tuple(views.output(tuple(digits_of(o) for o in output), output)), M.add(*map(extent, inners)),
        )  # fmt: skip
