"""ShardHeads: attention by heads, MLPs by hidden units and tables by vocabulary, divided among ranks.

The plan is derived: `meaning/placement/regions.py` finds what can be computed by parts, `parts.py` builds it,
and `meaning/check/ranks.py` proves it in float64, all ranks in one process, gradients included, before the
graph is changed. Regions with attention come first, so that a projection whose rows are heads is cut by
heads. A result of a region that is needed whole elsewhere (keys that the model returns) is gathered. What is
not divided stays as it is, computed by every rank; the report says why, with its line. Never changes what the
model computes, and knows no model, module or parameter by name.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from attngraph.ir.graph import Axis, ProgramGraph, Ranks, computed_from, module_of, op_name, source_of
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import ALL_GATHER, ALL_REDUCE, bytes_sent
from attngraph.meaning.check.ranks import RankChecks
from attngraph.meaning.element import Meaning
from attngraph.meaning.placement.demand import Unplaced
from attngraph.meaning.placement.elements import grouped
from attngraph.meaning.placement.regions import Product, Region, Regions
from attngraph.meaning.placement.table import Cut, differing
from attngraph.passes.build import Builder
from attngraph.passes.shard import Divide
from attngraph.passes.shard_heads.experts import Experts
from attngraph.passes.shard_heads.merge_sums import merge_sums
from attngraph.passes.shard_heads.parts import Parts
from attngraph.passes.shard_heads.vocabulary import Vocabulary
from attngraph.report.ranks import CacheRanksEntry, DividedEntry, RanksEntry, SentEntry


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
        self.ranks.entry = self._account(sizes, reasons)
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

    def _account(self, sizes: Mapping[str, int], reasons: Mapping[str, str]) -> RanksEntry:
        """The report's entry. `sizes`: how many elements every parameter has that the model uses, by name;
        negative for vectors. `reasons`: why a parameter is not divided."""
        sent, count = [], self.axis.count
        for node in (n for n in self.graph.graph.nodes if n.target in (ALL_REDUCE, ALL_GATHER)):
            value = node.all_input_nodes[0].meta["val"]  # for one token: the sizes that do not vary
            fixed = [n for n in value.shape if isinstance(n, int)]
            size = math.prod(fixed) * value.dtype.itemsize
            what, to_all = op_name(node).replace("_", "-"), bytes_sent(node.target, size, count)
            sent.append(SentEntry(what, source_of(node), size, to_all, len(fixed) == len(value.shape)))
        shards = {self.ranks.shards[i.name].parameter for i in self.graph.inputs if i.kind == "shard"}
        whole = [(n, s) for n, s in sizes.items() if n not in shards]
        other = "nothing of it is divided among ranks"
        return RanksEntry(
            count, tuple(self.entries), tuple(sent),
            tuple((n.removeprefix("model."), s, reasons.get(n, other)) for n, s in whole if s > 0),
            sum(s < 0 for _, s in whole),
            (sum(map(abs, sizes.values())),
             sum(abs(s) // (count if n in shards else 1) for n, s in sizes.items())),
        )  # fmt: skip


def _entry(region: Region) -> DividedEntry:
    what, node, units = "hidden units", region.product.node, region.product.extent
    if region.attentions:
        what, node = "heads", region.attentions[0]
        units = int(nodes.AttentionOp.of(node).q.meta["val"].shape[1])
    entry = node.meta.get("attention")
    return DividedEntry(what, module_of(node) if entry is None else entry.name, source_of(node), units)


def account_cache(graph: ProgramGraph, dtype: torch.dtype | None) -> CacheRanksEntry:
    """What each rank keeps of what a decoder keeps; `dtype`: of cached values, None: as computed."""
    assert graph.ranks is not None and graph.state is not None
    own, heads, stays = differing(graph), [], graph.ranks.undivided
    latents, shared, ranks = set[str](), set[str](), graph.ranks.count
    names = {node: name for name, node in graph.pages().items()}

    def kept_in(pages: Iterable[fx.Node]) -> list[str]:
        return [names[n] for n in computed_from(pages) if n in names]

    for node in graph.graph.nodes:
        match nodes.view(node):
            case nodes.DividedAttention():
                pass  # counted by tokens
            case nodes.CachedAttention(k_pages=pages) if pages in own:
                kept, of = int(pages.meta["val"].shape[1]), node.meta["attention"].kv_heads
                reasons = [stays[name] for name in kept_in([pages]) if name in stays]
                heads.append((kept, of, reasons[0] if reasons and kept * ranks > of else ""))
            case nodes.CachedLatentAttention(pages=pages):
                latents.update(kept_in([pages]))
            case nodes.CachedAttention(q=q, k_pages=k, v_pages=v) if q in own:
                shared.update(kept_in([k, v]))
    differs = {told.name: n in own for n, told in zip(graph.results(), graph.outputs, strict=True)}
    alike = [
        (s.label, s.bytes_in(dtype), "token",
         ("all heads share it" if s.name in latents
         else "the heads of every rank attend to it" if s.name in shared
         else "what it is kept for is not divided") + (f"; {stays[s.name]}" if s.name in stays else ""))
        for s in graph.state.stores if not differs[s.name] and s.team == 1
    ]  # fmt: skip
    alike += [
        (c.label, c.bytes_per_row, "sequence", "what it is carried for is not divided")
        for c in graph.state.carried if not differs[c.name]
    ]  # fmt: skip
    tokens = ((s.label, s.bytes_in(dtype), s.team) for s in graph.state.stores if s.team > 1)
    return CacheRanksEntry(graph.ranks.count, tuple(heads), tuple(alike), tuple(tokens))
