"""Tables by rows: embeddings and the projection to logits, divided among ranks by vocabulary.

A table is a parameter of which rows are chosen by numbers, or whose product with the last activations is a
result of the model; tied tables are one. Each rank has a run of rows. It looks up the numbers that are in its
run and gives zeros for the others, so that the sum over ranks is the embedding; of the logits it computes its
rows, which are gathered. (Numbers outside of the table still raise, as they do on one device.)
Where the number of rows is no multiple of the number of ranks, the table is divided by the width of its rows
instead. Tables with fewer rows than a row has values are left whole, and so are last projections that are not
at least twice as tall as they are wide.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph import module_of, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.walk import reached
from attngraph.meaning.check.ranks import RankChecks
from attngraph.meaning.placement.demand import Part, Unplaced, Use
from attngraph.meaning.placement.regions import Product, Regions
from attngraph.meaning.placement.table import Cut, Table
from attngraph.meaning.rule import Category, Unliftable
from attngraph.meaning.tokens.facts import ENTRIES
from attngraph.passes.build import Builder
from attngraph.passes.shard_heads.parts import Parts
from attngraph.report.ranks import DividedEntry

aten = torch.ops.aten
_TALL = 2
"""How many times more rows than columns a projection to logits has that is no embedding as well."""
_OTHER_FORM = "its product reads it in another form"


class Vocabulary:
    """Divides the tables of one graph."""

    def __init__(self, regions: Regions, parts: Parts, checks: RankChecks) -> None:
        self.graph, self.regions, self.parts, self.checks = regions.graph, regions, parts, checks
        self.meaning, self.ranks = regions.meaning, regions.ranks

    def divide(self, decided: dict[fx.Node, Cut], reasons: dict[fx.Node, str]) -> list[DividedEntry]:
        found = []
        ends = self._ends()
        for table in self.graph.placeholders():
            shape = table.meta["val"].shape
            if not self.regions.is_parameter(table) or table in decided or len(shape) != 2:
                continue
            lookups = [u for u in table.users if self._chosen(u, table) is not None]
            products = [p for n in ends for p in self.regions.products(n) if p.parameter is table]
            if not (lookups or products) or shape[0] < shape[1] * (1 if lookups else _TALL):
                continue
            try:
                cut = self._cut(table)
                changes = [(n, self._looked_up(n, table, cut)) for n in lookups]
                changes += [(p.node, self._multiplied(p, table, cut)) for p in products]
            except Unplaced as reason:
                reasons[table] = str(reason)
                continue
            for old, new in changes:
                old.replace_all_uses_with(new)
            decided[table] = cut
            self.meaning.forget_elements()
            node = (lookups or [p.node for p in products])[0]
            what, dim = ("rows of a table", 0) if 0 in cut else ("columns of a table", 1)
            found.append(DividedEntry(what, module_of(node), source_of(node), int(shape[dim])))
        return found

    def _cut(self, table: fx.Node) -> Cut:
        """The rows of each rank, or the columns."""
        shape = table.meta["val"].shape
        for dim in (0, 1):
            if shape[dim] % self.ranks == 0:
                return {dim: Table.blocks(int(shape[dim]), self.ranks)}
        neither = f"neither its {shape[0]} rows nor its {shape[1]} columns"
        raise Unplaced(f"{neither} can be divided among {self.ranks} ranks")

    def _ends(self) -> list[fx.Node]:
        """The products whose results leave the model without another product."""
        results = self.graph.graph.output_node().all_input_nodes

        def is_product(node: fx.Node) -> bool:
            return node.op == "call_function" and self.meaning.category(node) is Category.CONTRACTION

        def before(node: fx.Node) -> Sequence[fx.Node]:
            ends = is_product(node) or isinstance(node.meta.get("val"), tuple)
            return () if ends else node.all_input_nodes

        return list(filter(is_product, reached(results, before)))

    def _chosen(self, node: fx.Node, table: fx.Node) -> fx.Node | None:
        """The numbers by which a node picks rows of the table; None where it does something else."""
        try:
            at, value = self._moved(node)
        except (Unliftable, TypeError, Unplaced):
            return None
        if value.value is not table:
            return None
        row, column = value.args
        numbers = [n for n in E.walk(row) if n.op == "read"]
        plain = column is at[-1] and len(numbers) == 1
        return numbers[0].value if plain and isinstance(numbers[0].value, fx.Node) else None

    def _looked_up(self, node: fx.Node, table: fx.Node, cut: Cut) -> fx.Node:
        numbers = self._chosen(node, table)
        assert numbers is not None
        self.parts.whole = {table: None}
        mine, builder = self.parts.shard(table, cut), Builder(self.graph, node)
        args: Any = node.args
        pads_too = str(node.target) == "aten.embedding.default" and len(args) > 2
        padding = int(args[2]) if pads_too else -1
        rows = int(table.meta["val"].shape[0])

        def looked_up(places: fx.Node) -> fx.Node:
            given = {table: mine, numbers: places}
            mapped, kwargs = fx.map_arg((args, node.kwargs), lambda n: given.get(n, n))
            if pads_too:
                mapped = (*mapped[:2], -1, *mapped[3:])
            found = builder.call(node.target, *mapped, **kwargs)
            if padding < 0 or not self.graph.gradients:
                return found

            def without_gradient(numbers: Any, found: Any) -> Any:  # of the row that pads
                return torch.where(aten.eq.Scalar(numbers, padding).unsqueeze(-1), found.detach(), found)

            return builder.trace(without_gradient, numbers, found)  # type: ignore[no-any-return]

        def between(numbers: Any, limit: int) -> Any:
            return aten.ge.Scalar(numbers, 0).logical_and(aten.lt.Scalar(numbers, limit))

        def local(numbers: Any, first: Any) -> Any:
            """The numbers in a rank's run of rows, and which are in another's."""
            own = numbers - first
            mine_too = between(own, cut[0].count)
            others = between(numbers, rows).logical_and(mine_too.logical_not())
            return aten.masked_fill.Scalar(own, others, 0), others

        if 0 not in cut:
            new = self.parts.gathered(builder, looked_up(numbers), len(node.meta["val"].shape) - 1, cut[1])
        else:
            places, others = builder.trace(local, numbers, self.parts.number("first", cut[0].places[:, :1]))
            new = self.parts.summed(builder, builder.trace(
                lambda found, others: aten.masked_fill.Scalar(found, others.unsqueeze(-1), 0.0),
                looked_up(places), others,
            ))  # fmt: skip
        numbers.meta[ENTRIES] = min(rows, numbers.meta.get(ENTRIES, rows))
        return self._proved(node, new, [table, numbers], {numbers: rows})

    def _multiplied(self, product: Product, table: fx.Node, cut: Cut) -> fx.Node:
        node, dim = product.node, next(iter(cut))
        self.parts.begin()
        shards: dict[fx.Node, Cut] = {table: cut}
        weight_parts, weight_cuts = self._weight_parts(product, table, cut)
        if self._table_dim(product) == dim:  # what is summed over is divided
            self.parts.build(weight_parts, shards | weight_cuts)
            new = self.parts.product(product, product.part(cut[dim]))
        else:
            last = len(node.meta["val"].shape) - 1
            wanted = {last: cut[dim]}
            part = self.regions.demand.part(node, wanted)
            for use in part:
                if self.regions.is_parameter(use.operand) and use.cut:
                    shards[use.operand] = use.cut
            self.parts.build(weight_parts, shards | weight_cuts)
            twin = self.parts.twin(node, part, wanted)
            new = self.parts.gathered(Builder(self.graph, node), twin, last, cut[dim])
        return self._proved(node, new, [*self.parts.whole, *shards], {})

    def _table_dim(self, product: Product) -> int:
        """The dimension of the table that a product sums over."""
        node, dim = product.weight, product.weight_dim
        while node is not product.parameter:
            at, value = self._moved(node)
            if at[dim] not in value.args:
                raise Unplaced(_OTHER_FORM)
            node, dim = value.value, value.args.index(at[dim])
        return dim

    def _moved(self, node: fx.Node) -> tuple[tuple[Expr, ...], Expr]:
        """The place of any one element of a node, and the element that it is of another."""
        _, at = self.meaning.places(node)
        value = self.meaning.element(node, at)
        if value.op != "read":
            raise Unplaced(_OTHER_FORM)
        return at, value

    def _weight_parts(
        self, product: Product, table: fx.Node, cut: Cut
    ) -> tuple[dict[fx.Node, Part], dict[fx.Node, Cut]]:
        """The operations between the table and a product, which move its elements."""
        parts, cuts = dict[fx.Node, Part](), dict[fx.Node, Cut]()
        chain = [product.weight]
        while chain[-1] is not table:
            chain += chain[-1].all_input_nodes
        for node in reversed(chain[:-1]):
            at, value = self._moved(node)
            if any(value.args[d] not in at for d in cut):
                raise Unplaced(_OTHER_FORM)
            parts[node] = (Use(value.value, cut),)
            cut = cuts[node] = {at.index(value.args[d]): t for d, t in cut.items()}
        return parts, cuts

    def _proved(
        self, old: fx.Node, new: fx.Node, leaves: list[fx.Node], below: dict[fx.Node, int]
    ) -> fx.Node:
        self.checks.below = below
        problem = self.checks.same_value(old, new, leaves).problem
        self.checks.below = {}
        if problem:
            raise Unplaced(problem)
        return new
