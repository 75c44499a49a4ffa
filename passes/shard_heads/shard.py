"""ShardHeads: attention by heads, MLPs by hidden units and tables by vocabulary, divided among ranks.

The plan is derived: `meaning/placement/regions.py` finds what can be computed by parts, `parts.py` builds it,
and `meaning/check/ranks.py` proves it in float64, all ranks in one process, gradients included, before the
graph is changed. Regions with attention come first, so that a projection whose rows are heads is cut by
heads. A result of a region that is needed whole elsewhere (keys that the model returns) is gathered. What is
not divided stays as it is, computed by every rank; the report says why, with its line. Never changes what the
model computes, and knows no model, module or parameter by name.
"""

import dataclasses

from torch import fx

from attngraph.ir.graph import Axis, ProgramGraph, Ranks, module_of, source_of
from attngraph.ir.ops.nodes import AttentionOp
from attngraph.meaning.check.ranks import RankChecks
from attngraph.meaning.element import Meaning
from attngraph.meaning.placement.demand import Unplaced
from attngraph.meaning.placement.elements import grouped
from attngraph.meaning.placement.regions import Product, Region, Regions
from attngraph.meaning.placement.table import Cut
from attngraph.passes.build import Builder
from attngraph.passes.shard import Divide
from attngraph.passes.shard_heads.account import account
from attngraph.passes.shard_heads.experts import Experts
from attngraph.passes.shard_heads.merge_sums import merge_sums
from attngraph.passes.shard_heads.parts import Parts
from attngraph.passes.shard_heads.vocabulary import Vocabulary
from attngraph.report.ranks import DividedEntry


@dataclasses.dataclass(frozen=True)
class ShardHeads(Divide):
    """Divides heads, hidden units and vocabulary. `runs`: whether ranks may hold several runs of a parameter,
    as they need of packed projections."""

    group: str = "tensor"
    name: str = "shard-heads"
    runs: bool = True

    def divide(self, graph: ProgramGraph, ranks: Ranks, axis: Axis) -> list[str]:
        return _Sharding(graph, ranks, axis).run(self.runs)


class _Sharding:
    def __init__(self, graph: ProgramGraph, ranks: Ranks, axis: Axis) -> None:
        self.graph, self.ranks, self.axis = graph, ranks, axis
        self.meaning = Meaning.of(graph, complex_too=True)
        self.regions = Regions(graph, self.meaning, axis.count)
        self.parts = Parts(graph, self.meaning, axis)
        self.decided: dict[fx.Node, Cut] = {}
        self.entries: list[DividedEntry] = []
        self.reasons: dict[fx.Node, str] = {}
        """Why a parameter is not divided."""
        self.twins: dict[fx.Node, tuple[fx.Node, Cut, tuple[fx.Node, ...]]] = {}
        """Of each node that is computed by parts: its twin, the cut, what its region begins with."""
        self.checks = RankChecks(graph, self.parts.learns)
        sorted_tokens = filter(None, map(grouped, graph.graph.nodes))
        self.checks.ends = {told.ends: told.x for told in sorted_tokens}

    def run(self, runs: bool) -> list[str]:
        sizes = {
            i.name: n.meta["val"].numel() * (1 if n.meta["val"].ndim > 1 else -1)
            for n, i in self.parts.names.items() if i.kind == "parameter" and n.users
        }  # fmt: skip
        for only_attention in (True, False):
            if not only_attention:
                self.entries += Experts(self.regions, self.parts, self.checks).divide(self.decided)
            for node in list(self.graph.graph.nodes):
                products = self.regions.products(node) if node.users else ()
                if any(self._divide(product, only_attention) for product in products):
                    self.graph.clean()
        self._gather()
        vocabulary = Vocabulary(self.regions, self.parts, self.checks)
        self.entries += vocabulary.divide(self.decided, self.reasons)
        self.graph.clean()
        merge_sums(self.graph, self.meaning, self.parts)
        kept = self.parts.settle(runs)
        kinds = ("shard", "places", "parameter")
        self.graph.drop_inputs(lambda node, given: given.kind in kinds and not node.users)
        reasons = {self.parts.names[n].name: reason for n, reason in self.reasons.items()} | kept
        entries = tuple(self.entries)
        self.ranks.entry = account(self.graph, self.ranks, self.axis.count, entries, sizes, reasons)
        attention = sum(e.what == "heads" for e in self.entries)
        return [f"{len(self.entries)} part(s) divided among {self.axis.count} ranks, {attention} attention"]

    def _divide(self, product: Product, only_attention: bool) -> bool:
        """Compute the region that ends with a product by parts, if that can be done and is proved."""
        try:
            region = self.regions.grow(product)
            if only_attention and not region.attentions:
                return False
            if any(self.decided.get(n, region.cuts[n]) != region.cuts[n] for n in region.parameters):
                raise Unplaced("its parameters are divided otherwise elsewhere")
            made = self.parts.region(region)
            begins = (*self.parts.whole, *region.parameters)
            problem = self.checks.same_value(region.end, made, begins).problem
            if problem:
                raise Unplaced(problem)
        except Unplaced as reason:
            where = "" if "(" in str(reason) else source_of(product.node)
            self.reasons.setdefault(product.parameter, f"{reason} ({where})" if where else str(reason))
            return False
        for stop, why in region.stops.items():
            if why:
                self.reasons.update(dict.fromkeys(self.regions.weights_before(stop), why))
        twins = self.parts.twins
        self.twins.update((n, (twins[n], region.cuts[n], begins)) for n in region.parts)
        self.decided.update((n, region.cuts[n]) for n in region.parameters)
        self.entries.append(_entry(region))
        region.end.replace_all_uses_with(made)
        self.meaning.forget_elements()
        return True

    def _gather(self) -> None:
        """Gather what is computed by parts and needed whole elsewhere."""
        alive = [n for n in self.graph.graph.nodes if n in self.twins]
        for node in alive:
            outside = [u for u in node.users if u not in self.twins]
            twin, cut, begins = self.twins[node]
            cuts = [(d, t) for d, t in cut.items() if not t.is_whole]
            if not outside or len(cuts) > 1 or "val" not in node.meta or isinstance(node.meta["val"], tuple):
                continue
            builder = Builder(self.graph, node)
            try:
                whole = self.parts.gathered(builder, twin, *cuts[0]) if cuts else twin
            except Unplaced:
                continue
            if self.checks.same_value(node, whole, begins).problem:
                continue
            for user in outside:
                user.replace_input_with(node, whole)
            name = module_of(node)
            if cuts:
                self.entries.append(DividedEntry("gathered", name, source_of(node), cuts[0][1].extent))
        self.meaning.forget_elements()
        self.graph.clean()


def _entry(region: Region) -> DividedEntry:
    what, node, units = "hidden units", region.product.node, region.product.extent
    if region.attentions:
        what, node = "heads", region.attentions[0]
        units = int(AttentionOp.of(node).q.meta["val"].shape[1])
    entry = node.meta.get("attention")
    return DividedEntry(what, module_of(node) if entry is None else entry.name, source_of(node), units)
