"""Attentions that share weights or scores: which of them are worth fusing, and which become one.

Fusing saves nothing where the weights or the scores have another use and are computed anyway. But if that
use is an attention too (one softmax that weighs several tensors, one matrix of scores with a softmax over its
rows and another over its columns), all of them are fused together. Those with the same queries, keys and
program become one attention, whose values stand side by side. Used by `fuse_attention.py`.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import networkx as nx
from torch import fx

from attngraph.ir.graph import ProgramGraph, computed_from, own_line
from attngraph.ir.walk import reached
from attngraph.meaning import Category, M, Meaning
from attngraph.meaning.attention.claim import Attention, Operand
from attngraph.meaning.attention.program import Seed, Source
from attngraph.meaning.check.region import bytes_at
from attngraph.passes.look_later import Kinds, can_wait, results_of
from attngraph.report.words import binary


@dataclasses.dataclass(frozen=True)
class Found:
    """A node that equals the sum of `claims`, and the exponentials that are weights in it."""

    node: fx.Node
    claims: tuple[Attention, ...]
    weights: frozenset[fx.Node]

    @property
    def starts(self) -> dict[fx.Node, str]:
        """What fusing should remove, and what that is."""
        scores = {node: "scores" for claim in self.claims for node in claim.scores}
        return scores | dict.fromkeys(self.weights - {self.node}, "weights")

    @property
    def bases(self) -> frozenset[fx.Node]:
        """What queries, keys and values are views of."""
        return frozenset(n for c in self.claims for n in (*c.q.bases, *c.k.bases, *c.v.bases))

    @property
    def reads(self) -> frozenset[Source]:
        """What masks, biases and sinks read."""
        return frozenset(n for c in self.claims for n in c.reads)


def used_elsewhere(
    graph: ProgramGraph, meaning: Meaning, found: Sequence[Found], later: Kinds = ()
) -> dict[fx.Node, str]:
    """For each node, the use for which its weights or scores would still be computed after fusing all of
    them; nodes without such a use are left out. `later`: kinds of results that may wait until somebody looks
    at them."""
    fused = {each.node for each in found}
    view = nx.DiGraph()  # from weights and scores to all that is computed from them

    def users(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user not in fused]

    for node in reached((s for each in found for s in each.starts if s not in fused), users):
        view.add_node(node)
        view.add_edges_from((node, user) for user in users(node))
    output = graph.graph.output_node()
    if later and output in view:
        others = computed_from(node for node, _ in results_of(graph) if node not in view)
        seeds = {read.dropout for each in found for read in each.reads if isinstance(read, Seed)}
        for node in list(view.predecessors(output)) if others >= fused else ():
            if can_wait(graph, later, node, view.subgraph({node} | nx.ancestors(view, node)), seeds):
                view.remove_edge(node, output)
    reasons = {each.node: _other_use(graph, view, meaning, each, found) for each in found}
    return {node: reason for node, reason in reasons.items() if reason is not None}


def fusible(graph: ProgramGraph, meaning: Meaning, found: Sequence[Found], later: Kinds = ()) -> list[Found]:
    """The most of these that can be fused together without a use of their weights or scores elsewhere."""
    left = list(found)
    while left:
        kept = used_elsewhere(graph, meaning, left, later)
        if not kept:
            break
        left = [each for each in left if each.node not in kept]
    return left


def _other_use(
    graph: ProgramGraph, view: nx.DiGraph, meaning: Meaning, found: Found, others: Sequence[Found]
) -> str | None:
    reads: frozenset[Source] = frozenset().union(*(each.reads for each in others))
    used = reads.union(*(each.bases for each in others))
    sinks = {read for each in others for claim in each.claims for read in claim.sinks}
    for start, what in sorted(found.starts.items(), key=lambda s: s[1], reverse=True):
        if start not in view:
            continue
        for node in sorted(nx.descendants(view, start)):
            if node in sinks and what == "scores":
                return (
                    "a number is added to its normaliser after its scores were shifted by a number "
                    f"computed from them ({own_line(node)}): leave out the one or the other"
                )
            if node.op != "output" and node not in used:
                continue
            used_in = "its {} are also used in {}, so fusing would not remove them"
            between = nx.shortest_path(view, start, node)[1:-1]
            for product in (n for n in between if meaning.category(n) is Category.CONTRACTION):
                return used_in.format(what, f"another product ({own_line(product)})")
            if node.op == "output":
                results = [n for n in view.predecessors(node) if nx.has_path(view, start, n)]
                size = binary(bytes_at(start.meta["val"], graph.hints))
                told = used_in.format(what, _result_of(graph, results))
                told += f": they take {size} in the call that was compiled"
                instead = " (leave them out of the results, and compiled.weights computes them on demand)"
                return told + instead if what == "weights" else told
            operand = "mask or bias" if node in reads else "keys or values"
            return used_in.format(what, f"its own {operand} ({own_line(node)})")
    return None


def _result_of(graph: ProgramGraph, results: Sequence[fx.Node]) -> str:
    """These results of the graph in words: what the model returns, or attributes that its forward sets."""
    outputs = [output for node, output in results_of(graph) if node in results]
    places = ", ".join(map(own_line, results))
    if any(o.kind != "attribute" for o in outputs):
        return f"the model's results ({places})"
    names = " and ".join(sorted({o.name.rpartition(".")[2] for o in outputs}))
    return f"what forward() sets {names} to ({places})"


def join_values(found: Iterable[Found]) -> list[tuple[Found, ...]]:
    """Groups of attentions that differ in their values alone, so one attention can compute each group."""
    groups: dict[object, list[Found]] = {}
    for each in found:
        kind = _without_values(each.claims[0]) if len(each.claims) == 1 else each.node
        groups.setdefault(kind, []).append(each)
    together: list[tuple[Found, ...]] = []
    apart: list[tuple[Found, ...]] = []
    for group in groups.values():
        # What one attention weighs may be computed from the result of another.
        values = computed_from(base for each in group for claim in each.claims for base in claim.v.bases)
        depend = len(group) > 1 and any(each.node in values for each in group)
        together += [] if depend else [tuple(group)]
        apart += [(each,) for each in group] if depend else []
    return [*together, *apart]


def _without_values(claim: Attention) -> object:
    """Equal for attentions that differ in their values alone."""
    dtypes = {n.meta["val"].dtype for n in (claim.node, *claim.v.bases)}
    same = claim.q, claim.k, claim.program, claim.reads, claim.sizes
    return *same, len(claim.v.parts), frozenset(dtypes)


def computed_again(group: Sequence[Found], groups: Iterable[Sequence[Found]]) -> str:
    """That other groups compute the scores of this one too, and why, for the report; empty if none does."""
    mine = {start: what for each in group for start, what in each.starts.items()}
    others = ({mine[start] for each in other for start in each.starts if start in mine}
              for other in groups if other is not group)  # fmt: skip
    shared = list(filter(None, others))
    if not shared:
        return ""
    count = f"{len(shared) + 1} attentions, each of which computes the scores"
    if all("weights" in what for what in shared):
        return f"its softmax weighs values of different forms: {count}"
    return f"its scores have several softmaxes: {count}"


def side_by_side(claims: Sequence[Attention]) -> Attention:
    """Attentions that differ in their values as one, which has the values of all."""
    parts = zip(*(claim.v.parts for claim in claims), strict=True)
    values = Operand(tuple(tuple(itertools.chain.from_iterable(part)) for part in parts))
    return dataclasses.replace(claims[0], v=values, value_dim=M.add(*(c.value_dim for c in claims)))
