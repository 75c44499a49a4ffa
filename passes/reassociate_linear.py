"""ReassociateLinear: attention without a softmax at a cost linear in the tokens.

Matches sums of values weighted by plain products of queries and keys, over all keys or over those up to
the query (`meaning/attention/linear.py`), and sums of such weights, which some models use as normalisers:
(Q K^T) V becomes Q (K^T V), and under a causal mask running sums by chunks (Katharopoulos et al. 2020,
section 3.2). Right because a sum of products may be taken in any order; each claim is checked in float64.
Refuses where keys or values are parameters (then the cost is linear already), where the scores have other
uses, and where it would cost more at the sizes of the traced call.
"""

import dataclasses
import functools

import networkx as nx
import torch
from torch import fx

from attngraph.ir.graph.program_graph import Level, ProgramGraph, dependence, is_empty, is_size
from attngraph.ir.graph.source import caller_of, module_of, source_of
from attngraph.ir.language import E, Keep, Score, Weight
from attngraph.ir.ops.attention import linear_attention
from attngraph.meaning import Meaning
from attngraph.meaning.attention import linear
from attngraph.meaning.attention.claim import Attention
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.attention.program import Seed
from attngraph.meaning.attention.recogniser import Recogniser
from attngraph.meaning.check.region import numbers_at
from attngraph.meaning.masks import words
from attngraph.passes.build import Builder, NoSize, Refused
from attngraph.passes.proposal import Proposal
from attngraph.pipeline import Outcome
from attngraph.report.entries import OtherEntry

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
        self.weights = {node for node, given in graph.given().items() if given.kind != "argument"}
        for node in graph.graph.nodes:
            inputs = (n for n in node.all_input_nodes if not is_size(n))
            made = node.op == "call_function" and node.target is not aten.ones.default
            if made and not is_size(node) and self.weights.issuperset(inputs):
                self.weights.add(node)

    def run(self) -> Outcome:
        outcome, claims = Outcome(), []
        ones: dict[fx.Node, fx.Node] = {}
        for node in list(self.graph.graph.nodes):
            with Proposal(self.graph, node, survives=True) as examined:
                claim = self._examine(node, ones)
                if claim is not None:
                    claims.append(claim)
            if examined.problem:
                self._tell(outcome, node, examined.problem)
        for claim in reversed(self._alone(claims)):  # users of a normaliser before the normaliser
            causal = "causal, " if claim.program.keeps else ""
            reason = self._replace(claim)
            self._tell(outcome, claim.node, reason, f"{causal}keys and values are summed first")
        self.graph.clean()
        outcome.others.reverse()
        return outcome

    def _tell(self, outcome: Outcome, node: fx.Node, reason: str, done: str = "") -> None:
        """Note what was done, or why nothing; and tell it of a sum of values that no softmax weighs."""
        where, done = source_of(node), "" if reason else done
        is_left = f"left as it is: {where}: {reason}"
        outcome.notes.append(is_left if reason else f"linear attention at {where}: {done}")
        if str(node.target) not in linear.SUMS and not linear.has_softmax(self.meaning, node):
            outcome.others.append(OtherEntry(where, done, reason, module_of(node), *caller_of(node)))

    def _examine(self, node: fx.Node, ones: dict[fx.Node, fx.Node]) -> Attention | None:
        """What a node is, if its sum is to be reordered; Refused where it must stay as it is."""
        if is_empty(node) or not linear.is_root(self.meaning, node):
            return None
        claim = linear.examine(self.recogniser, node, self._ones(node, ones), self.weights)
        if isinstance(claim, Refusal):
            raise Refused(claim.reason)
        bases = () if claim is None else (*claim.k.bases, *claim.v.bases)
        # Where keys or values are parameters, layers in a row are linear in the tokens as they are.
        if claim is None or not claim.scores or not self.weights.isdisjoint(bases):
            return None
        self._require_gain(claim)
        return claim

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

    def _require_gain(self, claim: Attention) -> None:
        """Raise Refused where the linear form does not apply, or costs more; for symbolic lengths it counts
        as cheaper."""
        program = claim.program
        plain = all(isinstance(s, (Score, Keep, Weight)) for s in program.statements)
        if not plain or program.scale is None or any(isinstance(r, Seed) for r in claim.reads):
            raise Refused("its weights are not just a multiple of the scores")
        if any(k.predicate is not _CAUSAL or not k.is_hard for k in program.keeps):
            raise Refused(f"its mask is neither causal nor none ({words.describe(program)})")
        weights = (s.value for s in program.statements if isinstance(s, Weight))
        if any(n.op == "var" and n.value == "k" for value in weights for n in E.walk(value)):
            raise Refused("its weights are multiplied by something that depends on the key")
        rows, columns = (E.ONE, *self.meaning.shape(claim.scores[0]))[-2:]
        if rows.op != "const" and columns.op != "const":
            return
        q, k, d, e = numbers_at((rows, columns, claim.head_dim, claim.value_dim), self.graph.hints)
        if 2 * (q + k) * d * e >= q * k * (d + e):
            raise Refused("it would take more operations at these sizes")

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
        with Proposal(self.graph, claim.node, survives=True) as proposal:
            q, k, v = (proposal.operand(o) for o in (claim.q, claim.k, claim.v))
            # An operand may be read from before it was rounded.
            widest = functools.reduce(torch.promote_types, (o.meta["val"].dtype for o in (q, k, v)))
            q, k, v = (proposal.to(o, widest) for o in (q, k, v))
            sizes = [proposal.size(s) for s in claim.sizes]
            new = proposal.call(linear_attention, q, k, v, list(claim.reads), sizes, str(claim.program))
            new = proposal.view(new, claim.output)
            sources = (*claim.q.bases, *claim.k.bases, *claim.v.bases, *claim.reads)
            leaves = [s for s in sources if isinstance(s, fx.Node) and s.target is not aten.ones.default]
            # A normaliser may have been rewritten already: compare as functions of common inputs.
            proposal.check(claim.node, new, leaves)
            proposal.replace(claim.node, proposal.to(new, claim.node.meta["val"].dtype))
        return proposal.problem
