"""The recogniser: is this node an attention, and if so which?

There is only one, and it has no list of spellings. It takes the meaning of one element of a node that
sums products (`meaning/element.py`), separates it into weights and values (`weighted_sums.py`) and finds
the dot inside the scores (`dot.py`). From these `claim.py` builds a claim; the pass that uses it
checks the claim in float64 before anything is replaced (`meaning/check/check.py`).
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph import op_name
from attngraph.ir.kept import kept
from attngraph.ir.language import DOT, E, Expr
from attngraph.ir.walk import filled
from attngraph.meaning.algebra import M
from attngraph.meaning.algebra.fractions import NotASum
from attngraph.meaning.attention import dot as dots
from attngraph.meaning.attention import score_sets
from attngraph.meaning.attention.claim import SECOND_SUM, Attention, write_claim
from attngraph.meaning.attention.key_pieces import Piece, cover, join, separate
from attngraph.meaning.attention.normaliser import Refusal, collected, logarithm, split_by, stands_between
from attngraph.meaning.attention.partial_sums import PartialSums
from attngraph.meaning.attention.score_sets import QUOTIENTS, SUMS, is_sum
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import ELEMENTWISE, Category, TooLong, Unliftable, is_part
from attngraph.meaning.rules.reduction import LOG_SOFTMAX, SOFTMAX

from attngraph.meaning.attention.weighted_sums import (  # isort: skip
    KeyPart, Unnormalised, WeightedSum, key_part, weighted_sums,
)  # fmt: skip

SOFTMAX_LIKE = frozenset(f"aten.{n}" for n in (*SOFTMAX, "scaled_dot_product_attention.default"))
_EXPONENTIALS = SOFTMAX_LIKE | {
    f"aten.{n}" for n in (*LOG_SOFTMAX, "exp.default", "exp2.default", "logsumexp.default", "pow.Scalar")
}
_ROOTS = ("aten.mul.", "aten.div.", "aten.true_divide.", "aten.einsum.")
NEEDED_ANYWAY = "its scores are also used at other places than their own, so they are needed anyway"


class Recogniser:
    """Recognition over one graph. Nodes must be asked about in the graph's order."""

    def __init__(self, meaning: Meaning, gradients: bool) -> None:
        self.meaning = meaning
        self.gradients = gradients
        self._near: dict[fx.Node, frozenset[fx.Node]] = {}
        self.unnormalised: set[fx.Node] = set()
        self._too_long: set[fx.Node] = set()
        self._parts: dict[fx.Node, frozenset[fx.Node]] = {}
        self._of_values: dict[fx.Node, frozenset[fx.Node]] = {}

    def near(self, node: fx.Node) -> frozenset[fx.Node]:
        """The exponentials that this node's elements are computed from, without a contraction or
        an opaque op in between. Weights that follow from positions alone count as such."""

        def inputs(at: fx.Node) -> Sequence[fx.Node]:
            return at.all_input_nodes if self._end(at) is None else ()

        def near(at: fx.Node) -> frozenset[fx.Node]:
            end = self._end(at)
            if end is not None:
                return end
            if not self._too_long.isdisjoint(at.all_input_nodes):
                self._too_long.add(at)
                return frozenset()
            return frozenset().union(*(self._near[n] for n in at.all_input_nodes))

        return filled(self._near, node, inputs, near)

    def _end(self, node: fx.Node) -> frozenset[fx.Node] | None:
        """The exponentials of a node whose inputs are not asked; None for others."""
        if node.op != "call_function":
            return frozenset()
        if str(node.target) in _EXPONENTIALS:
            return frozenset(() if self.is_index(node) else (node,))
        if self._divides_positions(node):
            return frozenset((node,))
        category = self.meaning.category(node)
        if category is None and not is_part(node):
            return frozenset()
        if category is Category.CONTRACTION and node not in self.unnormalised:
            return frozenset()
        if category is Category.REDUCTION and not score_sets.adds_up(node):
            return frozenset()
        return None

    @kept
    def is_index(self, node: fx.Node) -> bool:
        """Whether a node is computed from indices alone, as ALiBi's slopes are."""
        operands = filter(self.meaning.is_tensor, node.all_input_nodes)
        return self.meaning.category(node) in ELEMENTWISE and all(map(self.is_index, operands))

    @kept
    def _of_positions(self, node: fx.Node) -> tuple[bool, bool]:
        """Whether a node follows from positions alone, and whether a sum is among what computes it."""
        operands = [n for n in node.all_input_nodes if self.meaning.is_tensor(n)]
        category = self.meaning.category(node)
        sums = category is Category.REDUCTION and str(node.target) in SUMS
        follows = (category in ELEMENTWISE or sums) and all(self._of_positions(n)[0] for n in operands)
        return follows, follows and (sums or any(self._of_positions(n)[1] for n in operands))

    def _divides_positions(self, node: fx.Node) -> bool:
        """Whether a node divides by a sum of what follows from positions alone, as it does itself."""
        is_quotient = node.op == "call_function" and str(node.target) in QUOTIENTS
        return is_quotient and self._of_positions(node) == (True, True)

    def examine(self, node: fx.Node) -> tuple[Attention, ...] | Refusal | None:
        """The attentions whose sum this node is, usually one; None where it does not look like attention
        at all."""
        if not self.may_be_attention(node):
            return None
        adds_parts = self._adds_parts(node)
        try:
            found = self._examine(node, adds_parts, frozenset())
            for of_values in self._may_be_values(node) if isinstance(found, Refusal) else ():
                again = self._examine(node, adds_parts, of_values)
                if isinstance(again, tuple):
                    reads = (read for claim in again for read in claim.reads if isinstance(read, fx.Node))
                    if not of_values.isdisjoint(frozenset().union(*map(self.near, reads))):
                        continue  # they belong to the weights after all
                    self._of_values[node] = of_values
                if isinstance(again, (tuple, Unnormalised)):
                    found = again
                    break
        except TooLong as problem:
            softmaxes = [n for n in self.exponentials(node) if str(n.target) in SOFTMAX_LIKE]
            self._near[node] = frozenset()
            self._too_long.add(node)  # formulas of nodes computed from it are longer still
            return Refusal(str(problem)) if softmaxes else None
        except Unliftable as problem:
            found = Refusal(stands_between(problem))
        if isinstance(found, (Refusal, tuple)):
            self.note_found(node)
        if isinstance(found, Refusal) and all(self._of_positions(n)[0] for n in self.exponentials(node)):
            return None  # a table, not weights: nothing that a user would call attention
        if isinstance(found, Refusal) and self.meaning.obstacles:
            return dataclasses.replace(found, sizes=found.sizes | self.meaning.obstacles)
        if isinstance(found, Unnormalised):
            self.unnormalised.add(node)
            self._near.pop(node, None)
            return None
        return found

    def may_be_attention(self, node: fx.Node) -> bool:
        """Whether a node weighs something with exponentials, or adds up parts that do."""
        return self._adds_parts(node) or self._is_root(node)

    def _adds_parts(self, node: fx.Node) -> bool:
        return is_sum(node) and len(self._parts_below(node)) > 1

    def note_found(self, node: fx.Node) -> None:
        """Note that a node is a sum weighted by exponentials."""
        if not self._adds_parts(node):
            self._parts[node] = frozenset((node,))

    def examine_pieces(self, sums: PartialSums, node: fx.Node) -> tuple[Attention, ...] | Refusal | None:
        """The attention that this node is, computed in pieces of its keys that were rescaled and added up;
        None where it is no such sum."""
        output, at = self.meaning.places(node)
        try:
            separated = separate(sums.of(node, at), self.meaning.fresh)
            if separated is None or isinstance(separated, Refusal):
                return separated

            def look(piece: Piece, formula: Expr) -> Expr:
                of_value = piece.weighted.free - piece.score.free
                keys = piece.keys or tuple(formula.free - of_value)
                return dots.look_into(self.meaning, formula, keys, of_value, node.meta["val"].dtype)

            joined = join(self.meaning, separated.pieces, look)
            if isinstance(joined, Refusal):
                return separated.problem or joined
            if separated.problem and not cover(self.meaning, joined, separated.divisor, look):
                return separated.problem
            parts = collected(key_part(piece.weighted, piece.keys, piece.score) for piece in joined)
            if isinstance(parts, Refusal):
                return parts
            found = WeightedSum(parts, logarithm(separated.sinks) if separated.sinks else None)
            return collected([self._claim(node, output, found)])
        except NotASum:
            return None
        except Unliftable as problem:
            return Refusal(str(problem))

    def _may_be_values(self, node: fx.Node) -> list[frozenset[fx.Node]]:
        """Exponentials that may belong to what is weighed (`p @ v.exp()`) and not to the weights: those that
        reach only one of the operands where results of exponentials are first multiplied with each other."""
        while len(below := list(filter(self.near, node.all_input_nodes))) == 1:
            (node,) = below
            if str(node.target) in _EXPONENTIALS:
                return []
        sides = list(map(self.near, below))
        own = [side.difference(*(other for other in sides if other is not side)) for side in sides]
        return [side for side in reversed(own) if side]

    @property
    def in_values(self) -> frozenset[fx.Node]:
        """The exponentials that turned out to belong to what attentions weigh."""
        return frozenset().union(*self._of_values.values())

    def exponentials(self, node: fx.Node) -> frozenset[fx.Node]:
        """The exponentials that are weights in the sum of `node`, or in its parts."""
        if str(node.target) in SOFTMAX_LIKE:
            return frozenset((node,)) - self._of_values.get(node, frozenset())
        places = [node]
        if is_sum(node) or self.is_product(node):
            places += frozenset().union(*map(self._parts_below, node.all_input_nodes))
        found = frozenset().union(*(self.near(n) for place in places for n in place.all_input_nodes))
        return found - self._of_values.get(node, frozenset())

    def _parts_below(self, node: fx.Node) -> frozenset[fx.Node]:
        """Sums weighted by exponentials, none an attention by itself, that this node moves or adds up."""
        if node not in self._parts:
            moves = self.meaning.category(node) is Category.MOVEMENT or is_sum(node)
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
        adds_up = self.meaning.category(node) is Category.CONTRACTION or op_name(node) == "sum"
        return (adds_up or self.is_product(node)) and any(map(self.near, node.all_input_nodes))

    def _examine(
        self, node: fx.Node, adds_parts: bool, of_values: frozenset[fx.Node]
    ) -> tuple[Attention, ...] | Refusal | Unnormalised | None:
        """As `examine`, with what is computed from the exponentials `of_values` alone left as it is."""
        meaning = self.meaning
        output, at = meaning.places(node)
        # The weights' divisor may be a factor of the result: then both operands are looked into.
        looks_below = adds_parts or self.is_product(node)
        averages = any(map(self._divides_positions, self.exponentials(node) - of_values))

        def through(read: Expr) -> bool:
            below = looks_below and self._parts_below(read.value)
            weights = self.near(read.value) - of_values
            return bool(weights or below) or (averages and self._of_positions(read.value)[0])

        lifted = meaning.lift(meaning.element(node, at), through, most=budgets.FORMULA_WORDS)
        lifted = score_sets.as_exponentials(lifted) if averages else lifted
        sums = weighted_sums(lifted, meaning.elementwise)
        if not isinstance(sums, tuple):
            return sums
        return collected(self._claim(node, output, found) for found in sums)

    def _claim(self, node: fx.Node, output: tuple[Expr, ...], found: WeightedSum) -> Attention | Refusal:
        """The claim for one sum weighted by one softmax. Products that a condition chooses between are parts
        of the keys, or (if these are no views) all but one are read from what the model computed."""
        dtype = node.meta["val"].dtype
        looked = self._looked_into(found, dtype)
        opened = self._with_products(looked, dtype)
        if isinstance(opened, Refusal):
            return opened
        pieces = [p for part in looked.parts for p in score_sets.split_by_product(self.meaning, part)]
        if len(pieces) > len(looked.parts):
            apart = self._with_products(dataclasses.replace(looked, parts=tuple(pieces)), dtype)
            claim = self._widest(node, output, apart) if isinstance(apart, WeightedSum) else apart
            if isinstance(claim, Attention):
                return claim
        return self._widest(node, output, opened)

    def _widest(self, node: fx.Node, output: tuple[Expr, ...], opened: WeightedSum) -> Attention | Refusal:
        """The claim in which as many products as possible are joined to the dot."""
        claim = write_claim(self.meaning, node, output, opened)
        while True:
            for parts in itertools.product(*map(self._with_another_product, opened.parts)):
                wider = dataclasses.replace(opened, parts=parts)
                found_wider = write_claim(self.meaning, node, output, wider)
                if isinstance(found_wider, Attention):
                    claim, opened = found_wider, wider
                    break
            else:
                return claim

    def _looked_into(self, found: WeightedSum, dtype: torch.dtype) -> WeightedSum:
        """The sum with scores and weights in terms of contractions, each of which has one name."""
        opened = []
        for part in found.parts:
            score, weight = (self._look_into(part, x, dtype) for x in (part.score, part.weight))
            looked = dataclasses.replace(part, score=dots.one_name(score), weight=weight)
            opened.append(score_sets.join_equal_products(self.meaning, looked))
        # A term that is the same for all keys (a subtracted maximum) changes no weight, except beside a sink.
        split = [split_by(part.score, part.keys) for part in opened]
        shift, sink = split[0][1], found.sink
        kept = self._sources(*(moving for moving, _ in split), *(part.value for part in found.parts))
        has_gradient = self.gradients and not self._sources(shift) <= kept
        if has_gradient or any(fixed is not shift for _, fixed in split):
            # The gradient of a shift is zero, but it may be asked for.
            split = [(M.add(moving, fixed), E.ZERO) for moving, fixed in split]
        elif sink is not None:
            sink = M.sub(sink, shift)
        parts = (dataclasses.replace(p, score=score) for p, (score, _) in zip(opened, split, strict=True))
        return WeightedSum(tuple(parts), sink and self._look_into(opened[0], sink, dtype))

    def _with_products(self, found: WeightedSum, dtype: torch.dtype) -> WeightedSum | Refusal:
        """The sum with its parts' dots, or why there is none."""
        parts = collected(self._with_product(part, dtype) for part in found.parts)
        return parts if isinstance(parts, Refusal) else dataclasses.replace(found, parts=parts)

    def _with_product(self, part: KeyPart, dtype: torch.dtype) -> KeyPart | Refusal:
        meaning, about, own = self.meaning, (part.keys, part.value.free), part.value.value.meta["val"].dtype
        found = dots.find_dot(meaning, part.score, *about) or dots.dot_of_width_one(part.score, *about, own)
        if found is None:
            is_plain = score_sets.has_no_product(part)
            return part if is_plain else Refusal(dots.why_no_dot(meaning, part.score, part.keys, dtype))
        dot, spelled = found
        # A term that the contraction itself adds (baddbmm's bias) has not been looked into yet.
        with_dot = (M.substitute(x, spelled) for x in (part.score, part.weight))
        score, weight = (self._look_into(part, x, dtype) for x in with_dot)
        if _reads(dot.node, score, weight):
            totals = [n for x in (score, weight) for n in E.walk(x) if n.op in E.BINDERS]
            return Refusal(SECOND_SUM if _reads(dot.node, *totals) else NEEDED_ANYWAY)
        return dataclasses.replace(part, score=score, weight=weight, products=(dot,))

    def _look_into(self, part: KeyPart, formula: Expr, dtype: torch.dtype) -> Expr:
        return dots.look_into(self.meaning, formula, part.keys, part.value.free, dtype)

    def _with_another_product(self, part: KeyPart) -> list[KeyPart]:
        """The part with another product of its scores, whose key side is computed from keys, in the dot."""
        if not part.products or any(n is DOT for n in E.walk(part.weight)):
            return []  # the weights depend on this product alone
        of_keys = part.products[0].k[0][0].free | part.value.free | set(part.keys)
        return [
            dataclasses.replace(part, score=rest, products=(*part.products, other))
            for other, rest in dots.other_dots(self.meaning, part.score, part.keys)
            if other.k[0][0].free <= of_keys | set(other.inner)
        ]

    def _sources(self, *formulas: Expr) -> frozenset[fx.Node]:
        """The floating inputs of the graph that these are computed from."""
        return frozenset().union(*(self._sources_of(n.value) for x in formulas for n in E.reads(x)))

    @kept
    def _sources_of(self, node: fx.Node) -> frozenset[fx.Node]:
        if node.op == "placeholder":
            return frozenset((node,) if node.meta["val"].is_floating_point() else ())
        return frozenset().union(*map(self._sources_of, node.all_input_nodes))


def _reads(node: fx.Node | None, *formulas: Expr) -> bool:
    """Whether an element of a value is read in one of these formulas."""
    return any(n.value is node for x in formulas for n in E.reads(x))
