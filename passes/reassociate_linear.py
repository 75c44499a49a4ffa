"""ReassociateLinear: attention without a softmax at a cost linear in the tokens.

Matches sums of values weighted by plain products of queries and keys, over all keys or over those up to
the query (`meaning/attention/linear.py`), and sums of such weights, which some models use as normalisers:
(Q K^T) V becomes Q (K^T V), and under a causal mask running sums by chunks (Katharopoulos et al. 2020,
section 3.2). Right because a sum of products may be taken in any order; each claim is checked in float64.
Refuses where keys or values are parameters (then the cost is linear already), where the scores have other
uses, and where it would cost more at the sizes of the traced call.
"""

from __future__ import annotations

import dataclasses
import logging

import networkx as nx
import torch
from torch import fx

from attngraph.ir.graph.program_graph import Level, ProgramGraph, dependence, is_empty, is_size
from attngraph.ir.graph.source import source_of
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import INDICES, Keep, Score, Weight
from attngraph.ir.ops.linear_attention import linear_attention
from attngraph.meaning.algebra.sizes import evaluate_size
from attngraph.meaning.attention import linear
from attngraph.meaning.attention.claim import NO_VIEW, Attention
from attngraph.meaning.attention.layout import NoView
from attngraph.meaning.attention.program import Seed
from attngraph.meaning.attention.recogniser import Recogniser
from attngraph.meaning.attention.refusal import Refusal
from attngraph.meaning.check.once import Checks
from attngraph.meaning.element import Meaning
from attngraph.meaning.masks import words
from attngraph.passes.build import Builder, NoSize
from attngraph.pipeline import Outcome

log = logging.getLogger(__name__)
aten = torch.ops.aten
_CAUSAL = E.make("le", (E.var("k"), E.var("q")), None, "bool")


@dataclasses.dataclass(frozen=True)
class ReassociateLinear:
    name: str = "reassociate-linear"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        return _Reassociation(graph).run()


class _Reassociation:
    def __init__(self, graph: ProgramGraph) -> None:
        self.graph = graph
        self.meaning = Meaning.of(graph)
        self.recogniser = Recogniser(self.meaning, graph.gradients)
        arguments = zip(graph.placeholders(), graph.inputs, strict=True)
        self.weights = {node for node, given in arguments if given.kind != "argument"}
        for node in graph.graph.nodes:
            inputs = (n for n in node.all_input_nodes if not is_size(n))
            made = node.op == "call_function" and node.target is not aten.ones.default
            if made and not is_size(node) and self.weights.issuperset(inputs):
                self.weights.add(node)

    def run(self) -> Outcome:
        outcome = Outcome()
        ones: dict[fx.Node, fx.Node] = {}
        claims = []
        for node in list(self.graph.graph.nodes):
            try:
                if not is_empty(node) and linear.is_root(self.meaning, node):
                    claim = linear.examine(self.recogniser, node, self._ones(node, ones), self.weights)
                    if isinstance(claim, Attention):
                        claim = self._why_not(claim) or claim if self._is_of_tokens(claim) else None
                    if isinstance(claim, Refusal):
                        outcome.notes.append(f"left as it is: {source_of(node)}: {claim.reason}")
                    elif claim is not None:
                        claims.append(claim)
            except Exception as problem:  # a bug in this pass leaves the node unchanged
                log.exception("could not examine %s at %s", node, source_of(node))
                outcome.notes.append(f"left as it is: {source_of(node)}: an error of the compiler: {problem}")
        for claim in reversed(self._alone(claims)):  # users of a normaliser before the normaliser
            source = source_of(claim.node)
            reason = self._replace(claim)
            causal = "causal, " if claim.program.keeps else ""
            done = f"linear attention at {source}: {causal}keys and values are summed first"
            outcome.notes.append(f"left as it is: {source}: {reason}" if reason else done)
        self.graph.clean()
        return outcome

    def _ones(self, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        """For a sum over the last dimension: a vector of ones of that length, as values."""
        if str(node.target) not in linear.SUMS:
            return None
        scores = node.args[0]
        if scores not in made:
            builder = Builder(self.graph, node)
            try:
                length = builder.size(self.meaning.shape(scores)[-1])
            except NoSize:
                return None
            like = scores.meta["val"]  # type: ignore[union-attr]
            ones = builder.call(aten.ones.default, [length], dtype=like.dtype, device=like.device)
            made[scores] = ones  # type: ignore[index]
        return made[scores]  # type: ignore[index]

    def _is_of_tokens(self, claim: Attention) -> bool:
        """Whether neither keys nor values are parameters: layers in a row are linear in the tokens as they
        are."""
        bases = (b for o in (claim.k, claim.v) for b in o.bases)
        return bool(claim.scores) and self.weights.isdisjoint(bases)

    def _why_not(self, claim: Attention) -> Refusal | None:
        """Why the linear form does not apply, or costs more; for symbolic lengths it counts as cheaper."""
        program = claim.program
        plain = all(isinstance(s, (Score, Keep, Weight)) for s in program.statements)
        if not plain or program.scale is None or any(isinstance(r, Seed) for r in claim.reads):
            return Refusal("its weights are not just a multiple of the scores")
        if any(k.predicate is not _CAUSAL or not k.is_hard for k in program.keeps):
            return Refusal(f"its mask is neither causal nor none ({words.describe(program)})")
        if any("k" in _indices(s.value) for s in program.statements if isinstance(s, Weight)):
            return Refusal("its weights are multiplied by something that depends on the key")
        rows, columns = (E.ONE, *self.meaning.shape(claim.scores[0]))[-2:]
        if rows.op != "const" and columns.op != "const":
            return None
        q, k, d, e = (
            int(evaluate_size(x, self.graph.hints)) for x in (rows, columns, claim.head_dim, claim.value_dim)
        )
        dearer = 2 * (q + k) * d * e >= q * k * (d + e)
        return Refusal("it would take more operations at these sizes") if dearer else None

    def _alone(self, claims: list[Attention]) -> list[Attention]:
        """The claims whose scores have no other use."""
        view = dependence(self.graph.graph)
        output = self.graph.graph.output_node()
        kept = claims
        while True:
            rest = nx.restricted_view(view, [c.node for c in kept], [])
            alone = [c for c in kept if all(s in rest and not nx.has_path(rest, s, output) for s in c.scores)]
            if len(alone) == len(kept):
                return kept
            kept = alone

    def _replace(self, claim: Attention) -> str:
        """Apply a claim; returns the reason if that fails."""
        builder = Builder(self.graph, claim.node)
        try:
            q, k, v = (builder.operand(o) for o in (claim.q, claim.k, claim.v))
            sizes = [builder.size(s) for s in claim.sizes]
            new = builder.call(linear_attention, q, k, v, list(claim.reads), sizes, str(claim.program))
            new = builder.view(new, claim.output)
        except (NoSize, NoView) as problem:
            builder.discard()
            return str(problem) or NO_VIEW
        sources = (*claim.q.bases, *claim.k.bases, *claim.v.bases, *claim.reads)
        leaves = [s for s in sources if isinstance(s, fx.Node) and s.target is not aten.ones.default]
        # A normaliser may have been rewritten already: compare as functions of common inputs.
        verdict = Checks(self.graph).same_value(claim.node, new, leaves)
        if verdict.problem:
            builder.discard()
            return verdict.problem
        wanted = claim.node.meta["val"].dtype
        if new.meta["val"].dtype != wanted:
            new = builder.call(aten._to_copy.default, new, dtype=wanted)
        claim.node.replace_all_uses_with(new)
        self.graph.graph.erase_node(claim.node)
        return ""


def _indices(node: Expr) -> set[str]:
    return {n.value for n in E.walk(node) if n.op == "var" and n.value in INDICES}
