"""What a rank computes of a region: a twin of every node of it, on the rank's part of the operands.

The nodes of the model stay until the twins are proved equal to them (`shard.py`). Inputs are added for a
rank's parts of parameters, and for numbers that differ by rank. A value that every rank has whole enters
through `sum_gradients`, where gradients flow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ORIGIN, Axis, Input, Numbers, ProgramGraph, Shard, source_of
from attngraph.ir.language import E, reindexed
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import ALL_GATHER, ALL_REDUCE, SUM_GRADIENTS
from attngraph.meaning import Meaning
from attngraph.meaning.placement.demand import Part, Unplaced, Use, head_dims
from attngraph.meaning.placement.elements import added_to
from attngraph.meaning.placement.regions import Product, Region
from attngraph.meaning.placement.table import Cut, Places, Table
from attngraph.passes.build import Builder
from attngraph.passes.shard import IMPOSSIBLE, RESIZED, Entering, on_parts, resized

aten = torch.ops.aten
HOLDS_RUNS = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 14)
"""Whether this torch's DTensors can have several equal runs of a dimension, and be made whole again."""
_WITHOUT_BIAS: dict[Any, Any] = {
    aten.linear.default: aten.linear.default, aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
}  # fmt: skip
_H = E.var("h")


class Parts(Entering):
    """Builds twins in one graph for the ranks of one axis."""

    def __init__(self, graph: ProgramGraph, meaning: Meaning, axis: Axis) -> None:
        super().__init__(graph, axis)
        assert graph.ranks is not None
        self.meaning, self.ranks = meaning, graph.ranks
        self.shards: dict[tuple[fx.Node, int, Table], fx.Node] = {}
        self.numbers: dict[Any, fx.Node] = {}
        self.twins: dict[fx.Node, fx.Node] = {}
        self.cuts: dict[fx.Node, Cut] = {}

    def region(self, region: Region) -> fx.Node:
        """The twins of a region; returns the node that replaces its product. Unplaced where it cannot be
        computed by parts after all."""
        self.begin()
        self.build(region.parts, region.cuts)
        return self.product(region.product, region.part, region.tail)

    def begin(self) -> None:
        """Forget the twins of the last region."""
        self.twins, self.cuts, self.whole = {}, {}, {}

    def build(self, parts: Mapping[fx.Node, Part], cuts: Mapping[fx.Node, Cut]) -> None:
        """Twins of nodes, operands first, and before of what else is cut, which are parameters."""
        for node in (*(n for n in cuts if n not in parts), *parts):
            cut = self.cuts[node] = cuts[node]
            self.twins[node] = self.twin(node, parts[node], cut) if node in parts else self.shard(node, cut)

    # --- one node ---

    def twin(self, node: fx.Node, part: Part, cut: Cut) -> fx.Node:
        """A node of whose result each rank has a part."""
        builder = Builder(self.graph, node)
        try:
            made = self._made(builder, node, part, cut)
        except IMPOSSIBLE as problem:
            raise Unplaced(f"{node.target} on a part of its operands: {problem}") from problem
        for key in ("attention", "tokens"):
            if key in node.meta:
                made.meta[key] = node.meta[key]
        wanted, found = node.meta["val"], made.meta["val"]
        if isinstance(wanted, Tensor):
            sizes = [cut[d].count if d in cut else n for d, n in enumerate(wanted.shape)]
            pairs = [p for p in zip(sizes, found.shape, strict=True) if all(isinstance(n, int) for n in p)]
            if any(a != b for a, b in pairs) or found.dtype != wanted.dtype:
                raise Unplaced(f"{node.target} has another shape on a part of its operands")
        return made

    def _made(self, builder: Builder, node: fx.Node, part: Part, cut: Cut) -> fx.Node:
        if nodes.view(node) is not None:
            return self._heads(builder, node, part, cut[1])
        given = {use.operand: self._operand(builder, use) for use in part}
        (first, *_) = given.values()
        if part[0].sources:
            return self._moved(builder, node, part[0], first, cut)
        if str(node.target) in RESIZED:
            return resized(builder, node, first, self._sizes(builder, node, cut))
        return on_parts(builder, node, given)

    def _sizes(self, builder: Builder, node: fx.Node, cut: Cut) -> list[Any]:
        shape = self.meaning.shape(node)
        return [cut[d].count if d in cut else builder.size(extent) for d, extent in enumerate(shape)]

    def _moved(self, builder: Builder, node: fx.Node, use: Use, x: fx.Node, cut: Cut) -> fx.Node:
        """Exactly what is needed of an operand, with its dimensions in the places of the result's."""
        for d, source in reversed(list(enumerate(use.sources))):
            x = x if source is not None else builder.call(aten.select.int, x, d, 0)
        places = [source for source in use.sources if source is not None]
        order = sorted(range(len(places)), key=places.__getitem__)
        x = builder.permuted(x, order)
        added = [d for d in range(len(self.meaning.shape(node))) if d not in places]
        x = builder.unsqueezed(x, *added)
        return builder.call(aten.expand.default, x, self._sizes(builder, node, cut)) if added else x

    def _heads(self, builder: Builder, node: fx.Node, part: Part, heads: Table) -> fx.Node:
        attention: Any = nodes.view(node)
        made: dict[str, Any] = {}
        uses = iter(part)
        for name in ("q", *attention.key_names, *attention.projection_names):
            if getattr(attention, name) is not None:
                made[name] = self._operand(builder, next(uses))
        reads = [self._operand(builder, use) for use in uses]
        local = {n for n in range(len(reads)) if head_dims(attention, n) is not None}
        program = reindexed(attention.program, "h", E.read(len(reads), (_H,)), local)
        if program is not attention.program:
            reads.append(self.number("heads", heads.places))
        node = builder.attention(attention.replace(**made, reads=tuple(reads), program=program))
        if isinstance(attention, nodes.Attention):
            node.meta["key_heads"] = part[1].cut[1].places.tolist()
        return node

    # --- operands ---

    def _operand(self, builder: Builder, use: Use) -> fx.Node:
        """A rank's part of an operand: of its twin, or of the whole value."""
        node, have = use.operand, self.cuts.get(use.operand, {})
        x = self.twins[node] if node in self.twins else self.enter(node)
        if not isinstance(node.meta["val"], Tensor):
            return x
        for dim in sorted({*have, *use.cut}):
            x = self._picked(builder, x, dim, have.get(dim), use.cut.get(dim), node)
        return x

    def _picked(
        self, builder: Builder, x: fx.Node, dim: int, have: Table | None, want: Table | None, node: fx.Node
    ) -> fx.Node:
        """What is wanted of a dimension, of what there is."""
        known = have or want
        assert known is not None
        whole = Table.whole(known.extent, known.ranks)
        have, want = have or whole, want or whole
        if have == want:
            return x
        places = have.positions(want)
        if places is None:
            raise Unplaced(f"a rank lacks a part of {node}")
        if not bool((places == places[0]).all()):
            return builder.call(aten.index_select.default, x, dim, self.number("places", places))
        return self._at(builder, x, dim, places[0])

    def _at(self, builder: Builder, x: fx.Node, dim: int, places: Tensor) -> fx.Node:
        """The entries of a dimension at places that are the same for every rank."""
        first, *steps = int(places[0]), *places.diff().tolist()
        if set(steps) <= {1}:
            return builder.call(aten.narrow.default, x, dim, first, len(places))
        if len(set(steps)) == 1 and steps[0] > 0:
            return builder.call(aten.slice.Tensor, x, dim, first, int(places[-1]) + 1, steps[0])
        every = self.number("places", places.repeat(self.axis.count, 1))
        return builder.call(aten.index_select.default, x, dim, every)

    # --- inputs ---

    def shard(self, parameter: fx.Node, cut: Cut) -> fx.Node:
        """A rank's part of a parameter."""
        ((dim, table),) = cut.items()
        key = (parameter, dim, table)
        if key not in self.shards:
            name = self.names[parameter].name
            same = sum(s.parameter == name for s in self.ranks.shards.values())
            label = f"{name}#{same}" if same else name
            value = parameter.meta["val"]
            sizes = [table.count if d == dim else n for d, n in enumerate(value.shape)]
            part = self.graph.empty(sizes, value.dtype, value.device)
            self.shards[key] = self.graph.add_input(Input("shard", label), part)
            self.shards[key].meta.update({k: v for k, v in parameter.meta.items() if k in ORIGIN})
            self.ranks.shards[label] = Shard(name, (dim,), (table.places,), self.axis.group)
        return self.shards[key]

    def number(self, name: str, places: Places) -> fx.Node:
        """An input of numbers that differ by rank."""
        key = (name, tuple(places.shape), tuple(places.flatten().tolist()))
        if key not in self.numbers:
            label = f"{name}{len(self.numbers)}"
            device = self.graph.placeholders()[-1].meta["val"].device
            own = self.graph.empty(places.shape[1:], torch.int64, device)
            self.numbers[key] = self.graph.add_input(Input("places", label), own)
            self.ranks.places[label] = Numbers(places.to(device), self.axis.group)
        return self.numbers[key]

    def settle(self, runs: bool) -> dict[str, str]:
        """Let ranks take their part of what cannot be held divided in each call: what is no run of rows or
        columns (or equally many equal runs, for packed projections), key/value heads that several ranks
        share, and parameters with other uses. Returns why, by the parameter's name. `runs`: whether a part
        may be several runs."""
        kept: dict[str, str] = {}
        for (parameter, dim, table), shard in list(self.shards.items()):
            name = self.names[parameter].name
            others = [u for u in parameter.users if u.target is not SUM_GRADIENTS or u.users]
            uses = [s for (p, _, _), s in self.shards.items() if p is parameter and s.users]
            if not shard.users:
                continue
            if table.copies > 1:
                kept[name] = f"ranks share parts of it ({table.describe()})"
            elif table.runs() is None:
                kept[name] = f"a rank's part is no equal runs of it ({table.describe()})"
            elif table.runs() != 1 and not runs:
                kept[name] = 'a rank\'s part is several runs of it, and parameters="even" leaves it whole'
            elif table.runs() != 1 and not HOLDS_RUNS:
                kept[name] = "torch holds parts of packed projections from version 2.14 on"
            elif others:
                kept[name] = f"it is used whole at {source_of(others[0]) or 'another place'}"
            elif len(uses) > 1:
                kept[name] = "two places divide it differently"
            else:
                continue
            whole, rows = self.enter(parameter), self.number("rows", table.places)
            mine = Builder(self.graph, min(shard.users)).call(aten.index_select.default, whole, dim, rows)
            shard.replace_all_uses_with(mine)
        self.graph.clean()
        return kept

    # --- where ranks come together ---

    def product(self, product: Product, part: Part, tail: Sequence[fx.Node] = ()) -> fx.Node:
        """The product of all ranks' parts: each rank's product, added up, and the bias. Ranks are added up
        after `tail`, operations that follow it and are linear in it."""
        builder = Builder(self.graph, product.node)
        target: Any = product.node.target
        given = {use.operand: self._operand(builder, use) for use in part}
        if product.bias is None:
            return self.added(product, on_parts(builder, product.node, given), tail)
        if target not in _WITHOUT_BIAS or product.node.kwargs:
            raise Unplaced(f"the bias of {target} cannot be added after the sum")
        operands: list[Any] = [a for a in product.node.args if a is not product.bias]
        mine = builder.call(_WITHOUT_BIAS[target], *(given[a] for a in operands))
        return self.added(product, mine, tail)

    def added(self, product: Product, mine: fx.Node, tail: Sequence[fx.Node]) -> fx.Node:
        """What all ranks have of a product together, after `tail`."""
        builder, last, bias = Builder(self.graph, product.node), product.node, product.bias
        if tail and bias is not None:
            mine, bias = builder.call(aten.add.Tensor, mine, self._of_first(builder, bias)), None
        for node in tail:
            builder = Builder(self.graph, node)
            added = added_to(node, last)
            others = {n: self.enter(n) for n in node.all_input_nodes if n not in (last, added)}
            if added is not None:
                others[added] = self._of_first(builder, added)
            mine, last = builder.again(node, {**others, last: mine}.__getitem__), node
            if "attention" in node.meta:
                mine.meta["attention"] = node.meta["attention"]
        return self.summed(builder, mine, bias)

    def _of_first(self, builder: Builder, node: fx.Node) -> fx.Node:
        """A value that all ranks have, for one of them; zero for the others."""
        first = self.number("first", (torch.arange(self.axis.count, device="cpu") == 0).long().unsqueeze(1))
        own = builder.call(aten.ne.Scalar, first, 0)
        return builder.call(aten.where.ScalarOther, own, self.enter(node), 0.0)

    def summed(self, builder: Builder, mine: fx.Node, bias: fx.Node | None = None) -> fx.Node:
        found = builder.call(ALL_REDUCE, mine, self.axis.group)
        return found if bias is None else builder.call(aten.add.Tensor, found, bias)

    def gathered(self, builder: Builder, mine: fx.Node, dim: int, table: Table) -> fx.Node:
        """All of a dimension of which each rank has a part; Unplaced where nobody has some of it."""
        flat = table.places.flatten().tolist()
        first = {index: place for place, index in reversed(list(enumerate(flat)))}
        if len(first) != table.extent:
            raise Unplaced("no rank has all of it")
        found = builder.call(ALL_GATHER, mine, dim, self.axis.count, self.axis.group)
        order = torch.tensor([first[index] for index in range(table.extent)])
        if torch.equal(order, torch.arange(len(flat))):
            return found
        return self._at(builder, found, dim, order)
