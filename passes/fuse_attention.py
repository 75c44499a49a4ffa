"""FuseAttention: replace every attention by one `attngraph::attention` node.

Matches whatever `meaning/attention/recogniser.py` recognises: a sum of values weighted by a softmax of scores
that hold a product of queries and keys, however it is written; at last, sums of pieces of the keys that a
loop rescales and adds up. Right because every claim is checked in
float64, values and (where they flow) gradients, at two sizes, before the graph is touched; equal layers
are checked once. Results that need the weights wait until somebody looks at them (`look_later.py`). Refuses a
claim that fails its check, and an attention whose weights are used elsewhere, because then nothing would be
saved.
"""

import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Sequence

import sympy
import torch
from torch import fx

from attngraph.ir.language import expr as E
from attngraph.ir.ops import nodes
from attngraph.ir.walk import filled, reached
from attngraph.meaning import Category, M, Meaning, to_sympy
from attngraph.meaning.attention.claim import Attention
from attngraph.meaning.attention.equal_claims import OnceRecogniser
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.attention.partial_sums import PartialSums
from attngraph.meaning.attention.program import Seed
from attngraph.meaning.attention.recogniser import SOFTMAX_LIKE
from attngraph.meaning.attention.routing import describe_edges, find_choice, is_of_one_key
from attngraph.meaning.check.check import Checks
from attngraph.passes import shared_scores
from attngraph.passes.attention_entries import describe, describe_claim
from attngraph.passes.build import Builder, Refused
from attngraph.passes.look_later import Kinds, take_results
from attngraph.passes.proposal import Proposal
from attngraph.passes.shared_scores import Found
from attngraph.pipeline import Outcome
from attngraph.report.entries import AttentionEntry, Missed

from attngraph.ir.graph import (  # isort: skip
    RESULTS, Level, ProgramGraph, caller_of, is_empty, is_size, keep_sizes, measured_sizes, memory_of,
    module_of, replace_in_other_users, sort, source_of,
)  # fmt: skip

log = logging.getLogger(__name__)
TOO_DEEP = (
    "too many operations follow one another between its operands and its weights to be read, as where a "
    "Python loop writes the scores one by one: compute them by one product"
)
Recognise = Callable[[fx.Node], tuple[Attention, ...] | Refusal | None]
NO_VALUES = "nothing is summed with its weights along the softmaxed dimension"
UNNORMALISED = "exponentials of scores weigh a sum that is not divided by their own sum over the same keys"
AS_VALUES = "it computes values that another softmax weighs, and is no softmax over keys itself"
OF_FEATURES = (
    "its softmax runs over features: its keys are weights of the model and its values are computed from the "
    "input, so it stays an operation on each token"
)
OF_DATA = "its sizes follow from data, and nothing shows that queries, keys and values fit each other"
EMPTY = "it has no elements in a call of these sizes, so nothing is computed"
ONE_KEY = "it has one key, whose weight is 1 whatever its score"


@dataclasses.dataclass(frozen=True)
class FuseAttention:
    """`later`: the kinds of results that, where they need weights of fused attentions, are computed when
    somebody looks at them. `features`: whether a softmax over features, whose keys are weights of the model
    and whose values are not, becomes an attention too; in a decoder it is an operation on each token."""

    later: tuple[str, ...] = RESULTS
    features: bool = True
    name: str = "fuse-attention"
    requires: Level = Level.CANONICAL
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        return _Fusion(graph, self.later, self.features).run()


class _Fusion:
    """One run of the pass on one graph."""

    def __init__(self, graph: ProgramGraph, later: Kinds, features: bool) -> None:
        self.graph, self.later, self.features = graph, later, features
        # The results that may wait: none, until attentions that share weights have been found.
        self.may_wait: Kinds = ()
        self.meaning = Meaning.of(graph)
        self.recogniser = OnceRecogniser(self.meaning, graph.gradients)
        self.outcome = Outcome()
        self.fused = 0
        self.reasons: dict[fx.Node, Refusal] = {}
        self.follows_arguments = FollowsArguments(graph)
        self.in_pieces: set[fx.Node] = set()
        self.checks = Checks(graph)
        # Attentions whose weights or scores had another use when they were found.
        self.waiting: list[Found] = []
        # Weights and scores that fused attentions no longer need, and the seeds of their dropouts.
        self.freed: dict[fx.Node, str] = {}
        self.seeds: dict[fx.Node, fx.Node] = {}
        # What nodes stand for that were fused beside results.
        self.beside: dict[fx.Node, fx.Node] = {}

    def run(self) -> Outcome:
        for node in self.graph.attentions():  # that the model itself calls
            node.args, node.kwargs = nodes.AttentionOp.of(node).args, {}
            node.meta["attention"] = describe(node, self.graph)
        for node in list(self.graph.graph.nodes):
            refused = self._attempt(node, self.recogniser.examine)
            if refused is not None:
                for place in sorted(self.recogniser.exponentials(node)):
                    # The reason for the sum itself is more helpful than that for a product with a gate.
                    if not (self.recogniser.is_product(node) and place in self.reasons):
                        self.reasons[place] = refused
        self._fuse_pieces()
        self._fuse_beside_results()
        if self.later:
            self.outcome.notes += [
                f"{name} is computed when somebody looks at it"
                for name in take_results(self.graph, self.later, self.freed, self.seeds, self.beside)
            ]
        if self.graph.gradients:
            self._own_results()
        self.graph.clean()
        self._report_missed()
        checks = f"{len(self.checks.verdicts)} distinct one(s) checked in float64"
        if self.fused:
            self.outcome.notes.insert(0, f"fused {self.fused}, {checks}")
        return self.outcome

    def _attempt(
        self, node: fx.Node, recognise: Recognise, weights: frozenset[fx.Node] | None = None
    ) -> Refusal | None:
        """Fuse what a node is recognised as; `weights` are its exponentials, if the recogniser does not say.
        An error in our own code counts as a refusal."""
        if is_empty(node):
            return Refusal(EMPTY)
        try:
            found = recognise(node)
            while self.meaning.required:  # what element rules took to be equal
                condition = sympy.Eq(*map(to_sympy, self.meaning.required.pop()))
                if condition not in self.graph.conditions:
                    self.graph.conditions += (condition,)
            if not isinstance(found, tuple):
                return found
            if any(map(self._is_of_features, found)):
                return Refusal(OF_FEATURES)
            return self._fuse(node, found, self.recogniser.exponentials(node) if weights is None else weights)
        except RecursionError:
            return Refusal(TOO_DEEP)
        except Exception as problem:
            log.exception("could not examine %s at %s", node, source_of(node))
            return Refusal(f"an error of the compiler, please report it: {type(problem).__name__}: {problem}")

    def _fuse_beside_results(self) -> None:
        """Fuse attentions whose weights or scores are used in results alone that may wait."""
        self.may_wait = self.later
        for found in self.waiting if self.later else ():
            if any(found is each for each in self.waiting):
                self._attempt(found.node, {found.node: found.claims}.get, found.weights)
            elif found.node not in self.beside and found.node in set(self.graph.graph.nodes):
                # what it reads was replaced
                self._attempt(found.node, self.recogniser.examine, found.weights)

    def _fuse_pieces(self) -> None:
        """Fuse attentions that are computed in pieces of their keys, the largest sum of pieces first."""
        sums = PartialSums(self.meaning)
        order = list(self.graph.graph.nodes)
        known = [node for node in order if sums.kind(node) is not None]
        found = [node for node in known if self.meaning.is_tensor(node) and sums.pieces(node)]
        refusals: dict[frozenset[fx.Node], tuple[fx.Node, Refusal]] = {}
        done: set[frozenset[fx.Node]] = set()
        obstacles, alive = set(self.meaning.obstacles), set(order)
        for node in reversed(found):
            pieces = sums.pieces(node) if node in alive else frozenset()  # replaced with another one
            if not pieces or pieces in done or any(pieces < others for others in (*done, *refusals)):
                continue
            before = self.fused
            weights = frozenset(n for n in sums.below(node) if sums.begins(n))
            refused = self._attempt(node, functools.partial(self.recogniser.examine_pieces, sums), weights)
            if self.fused > before:
                sums, alive = PartialSums(self.meaning), set(self.graph.graph.nodes)
                done.add(pieces)
                refusals.pop(pieces, None)
                self.in_pieces |= weights
            elif refused is not None and len(pieces) > 1 and any(map(self._is_of_scores, weights)):
                refusals.setdefault(pieces, (node, refused))
                self.in_pieces |= weights
        self.meaning.obstacles = obstacles  # of the attentions that were recognised at first
        # Pieces of one attention are told of as one.
        self.reasons = {n: why for n, why in self.reasons.items() if n not in self.in_pieces}
        self.reasons |= dict(refusals.values())

    def _own_results(self) -> None:
        """Copy the outputs that results share memory with: callers may write there, backward passes read."""
        for node in self.graph.graph.output_node().all_input_nodes:
            whole = memory_of(node)
            if isinstance(nodes.view(whole), nodes.Attention):
                out = next(user for user in whole.users if user.args[1] == 0)
                builder = Builder(self.graph, out.next)
                copied = builder.call(torch.ops.aten.clone.default, out)
                replace_in_other_users(out, copied)

    def _fuse(self, old: fx.Node, claims: Sequence[Attention], weights: frozenset[fx.Node]) -> Refusal | None:
        """Check the claims, whose sum should equal the node, and apply them; or return why not."""
        found = Found(old, tuple(claims), weights)
        about, together = (self.graph, self.meaning), [found]
        elsewhere = shared_scores.used_elsewhere(*about, together, self.may_wait)
        if elsewhere:
            self.waiting = [*(w for w in self.waiting if w.node is not old), found]
            sharing = [w for w in self.waiting if not w.starts.keys().isdisjoint(found.starts)]
            together = shared_scores.fusible(*about, sharing, self.may_wait)
            if found not in together:
                return Refusal(elsewhere[old])
        with Proposal(self.graph, old, self.checks) as proposal:
            self._build_and_check(together, proposal)
        return Refusal(proposal.problem) if proposal.problem else None

    def _build_and_check(self, together: Sequence[Found], proposal: Proposal) -> None:
        """Build the attentions of these nodes, check all, and only then replace the nodes."""
        seeds: dict[Seed, fx.Node] = {}  # attentions under one dropout use the same random numbers
        replaced: dict[fx.Node, fx.Node] = {}
        entries: list[tuple[fx.Node, AttentionEntry]] = []
        notes: list[str] = []
        groups = shared_scores.join_values(together)
        for group in groups:
            made = len(proposal.made)
            builder = proposal.at(max(each.node for each in group))
            try:
                results, claims, leaves = _build(builder, group, seeds)
            except ValueError as problem:
                if not any(measured_sizes(each.node) for each in group):
                    raise
                raise Refused(OF_DATA) from problem
            for old, new in results.items():
                verdict = self.checks.same_value(old, new, leaves)
                if verdict.problem:
                    log.warning("refused %s at %s: %s", old, source_of(old), verdict.problem)
                    raise Refused(f"a fused node would not compute the same: {verdict.problem}")
            wholes = [n for n in proposal.made[made:] if nodes.view(n) is not None]
            again = shared_scores.computed_again(group, groups)
            for whole, claim in zip(wholes, claims, strict=True):
                entry, said = describe_claim(claim, verdict, whole, self.graph)
                entries.append((whole, dataclasses.replace(entry, again=again)))
                notes += said
            replaced |= results
        read = frozenset(n for each in together for n in each.bases | each.reads)
        for each in together:  # scores of one may be a bias of another
            self.freed |= {start: what for start, what in each.starts.items() if start not in read}
        self.seeds |= {read.dropout: seed for read, seed in seeds.items()}
        for old, new in replaced.items():
            self.follows_arguments.replace(old, new)
            keep_sizes(old, new)
            old.replace_all_uses_with(new)
            if self.may_wait:  # what the new one is tied to
                self.beside[old] = new
            else:
                self.graph.graph.erase_node(old)
        for whole, entry in entries:
            whole.meta["attention"] = entry
        self.fused += len(entries)
        self.outcome.notes += notes
        if len(together) > 1:
            sort(self.graph.graph)  # joined attentions stand where the last of them stood
            self.meaning.forget_elements()
        self.waiting = [w for w in self.waiting if replaced.keys().isdisjoint({w.node, *w.bases, *w.reads})]

    def _report_missed(self) -> None:
        alive = set(self.graph.graph.nodes)
        for node in sorted(alive & self.recogniser.unnormalised):
            for place in sorted(self.recogniser.exponentials(node)):
                if place not in self.in_pieces and self._is_of_scores(place):
                    self.reasons.setdefault(place, Refusal(UNNORMALISED))
        for node in self.graph.graph.nodes:
            if str(node.target) in SOFTMAX_LIKE and node not in {*self.reasons, *self.in_pieces}:
                # The sum of values may follow a view that was not traced through.
                unseen = Refusal(NO_VALUES, frozenset(self.meaning.obstacles))
                unseen = Refusal(AS_VALUES) if node in self.recogniser.in_values else unseen
                self.reasons[node] = Refusal(ONE_KEY) if is_of_one_key(node) else unseen
            edges = describe_edges(self.meaning, node) if str(node.target) == "aten.exp.default" else None
            if edges is not None:
                self.reasons[node] = Refusal(edges)
        for node, why in self.reasons.items():
            if node not in alive:
                continue
            source = source_of(node)
            choice = find_choice(self.meaning, node) if str(node.target) in SOFTMAX_LIKE else None
            is_routing = choice is not None and not self._is_of_scores(choice.among)
            reason = why.reason if choice is None else choice.reason(is_routing)
            self.outcome.missed.append(Missed(reason, source, module_of(node), is_routing, *caller_of(node)))
            self.outcome.obstacles |= why.sizes
            self.outcome.notes.append(f"left alone at {source}: {reason}")

    def _is_of_features(self, claim: Attention) -> bool:
        """Whether keys are weights of the model and values are not: the softmax runs over features."""
        k, v = (any(map(self.follows_arguments, operand.bases)) for operand in (claim.k, claim.v))
        return v and not k and (not self.features or claim.value_dim.op != "const")

    def _is_of_scores(self, value: fx.Node) -> bool:
        """Whether it is computed from products in which both sides depend on inputs of the model."""

        def opened(node: fx.Node) -> tuple[Category | None, list[fx.Node]]:
            sides = [n for n in node.all_input_nodes if self.meaning.is_tensor(n)]
            if str(node.target).startswith("aten.sum.") and self.recogniser.is_product(sides[0]):
                return Category.CONTRACTION, sides[0].all_input_nodes
            return self.meaning.category(node) if node.op == "call_function" else None, sides

        def below(node: fx.Node) -> list[fx.Node]:
            category, sides = opened(node)
            return sides if category in (Category.MOVEMENT, Category.POINTWISE) else []

        products = (s for c, s in map(opened, reached([value], below)) if c is Category.CONTRACTION)
        return any(all(map(self.follows_arguments, sides)) for sides in products)


class FollowsArguments:
    """Which values of a graph are computed from arguments of the call, not from weights and constants alone.
    What is known of a value is kept while its nodes stay."""

    def __init__(self, graph: ProgramGraph) -> None:
        self.graph = graph
        self._known: dict[fx.Node, bool] = {}

    def __call__(self, value: fx.Node) -> bool:
        """Whether a value is computed from arguments. Sizes are not followed."""
        known = self._known
        if not known:
            known |= {node: given.kind == "argument" for node, given in self.graph.given().items()}

        def operands(node: fx.Node) -> list[fx.Node]:
            return [] if is_size(node) else node.all_input_nodes

        return filled(known, value, operands, lambda node: any(known[n] for n in operands(node)))

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Another value takes the place of one. Where the answer for it is another one, all is asked anew."""
        if old in self._known and self(new) != self._known[old]:
            self._known.clear()


def _build(
    builder: Builder, group: Sequence[Found], seeds: dict[Seed, fx.Node]
) -> tuple[dict[fx.Node, fx.Node], Sequence[Attention], list[fx.Node]]:
    """What replaces each node of a group that shares one attention, or one node that is a sum of several; the
    claims that were built; and the tensors of the model that they are computed from."""
    leaves: list[fx.Node] = []
    results: dict[fx.Node, fx.Node] = {}
    if len(group) > 1:
        claims: Sequence[Attention] = [shared_scores.side_by_side([each.claims[0] for each in group])]
        whole, start = _build_one(builder, claims[0], leaves, seeds), E.ZERO
        for each in group:
            width = each.claims[0].value_dim
            place = builder.size(start), builder.size(width)
            part, start = builder.call(torch.ops.aten.narrow.default, whole, 3, *place), M.add(start, width)
            results[each.node] = builder.view(part, each.claims[0].output)
    else:
        (found,) = group
        claims = found.claims
        parts = [builder.view(_build_one(builder, c, leaves, seeds), c.output) for c in claims]
        results[found.node] = builder.trace(lambda *parts: functools.reduce(operator.add, parts), *parts)
    for old, new in results.items():
        results[old] = builder.to(new, old.meta["val"].dtype)
    return results, claims, list(dict.fromkeys(leaves))


def _build_one(
    builder: Builder, claim: Attention, leaves: list[fx.Node], seeds: dict[Seed, fx.Node]
) -> fx.Node:
    """The result of one attention, `[B, Hq, Sq, Dv]`."""
    bases = [base for operand in (claim.q, claim.k, claim.v) for base in operand.bases]
    widest = functools.reduce(torch.promote_types, (n.meta["val"].dtype for n in bases))
    if not widest.is_floating_point:
        raise Refused(f"its queries, keys and values are whole numbers ({widest})")
    q, k, v = (builder.operand(operand, widest) for operand in (claim.q, claim.k, claim.v))
    if any(isinstance(n, int) and n == 0 for n in q.meta["val"].shape[:3]):
        raise Refused(EMPTY)
    leaves += bases
    for seed in claim.reads:
        if isinstance(seed, Seed) and seed not in seeds:
            device = q.meta["val"].device
            seeds[seed] = builder.call(torch.ops.attngraph.seed.default, *[device] * (device.type != "cpu"))
    reads = [seeds[read] if isinstance(read, Seed) else read for read in claim.reads]
    leaves += [read for read in claim.reads if isinstance(read, fx.Node)]
    sizes = [builder.size(s) for s in claim.sizes]
    whole = builder.attention(nodes.Attention(q=q, k=k, v=v, reads=reads, sizes=sizes, program=claim.program))
    return builder.call(operator.getitem, whole, 0)
