"""Regions of a graph that ranks compute by parts: from values that all ranks have to a sum over ranks.

A product with a weight sums over a dimension. If each rank has a part of that dimension, it has a part of the
sum, and one reduction gives the result to all. From there demands are followed backwards, node by node
(`demand.py`), until they reach rows of parameters, or values that every rank has anyway. So attention with
its output projection is such a region (the dimension is heads, and rows of the projections of queries, keys
and values follow), and so is an MLP (the dimension is its hidden units, whatever stands between the two
products and however many products there are before it). Several demands on one value are united: a packed
projection gets the rows of queries, keys and values.
"""

import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from attngraph.ir.graph import Input, ProgramGraph, computed_from, source_of
from attngraph.ir.ops import nodes
from attngraph.ir.walk import reached
from attngraph.meaning.algebra.sums import sum_of_products
from attngraph.meaning.element import Meaning
from attngraph.meaning.placement.demand import Demand, Part, Unplaced, Use
from attngraph.meaning.placement.elements import Tails, any_element, attention_of, category
from attngraph.meaning.placement.table import Cut, Table, is_cut, united
from attngraph.meaning.rule import ELEMENTWISE, Category


@dataclasses.dataclass(frozen=True)
class Product:
    """A contraction with a weight. `variable` is summed over; `source` and `weight` are the operands, with
    the dimension that it runs over, `parameter` the weight's placeholder, `bias` what is added to the sum."""

    node: fx.Node
    extent: int
    source: fx.Node
    source_dim: int
    weight: fx.Node
    weight_dim: int
    parameter: fx.Node
    bias: fx.Node | None

    def part(self, table: Table) -> Part:
        """How ranks compute it that have these indices of what is summed over."""
        source = Use(self.source, {self.source_dim: table})
        return source, Use(self.weight, {self.weight_dim: table})


@dataclasses.dataclass(frozen=True)
class Region:
    """What ranks compute by parts for one product.

    `parts` has the nodes, operands first, without the product itself; `cuts` what a rank has of each of them,
    and of the parameters. All other values that are used are had whole by every rank; `stops` has those that
    are computed from weights, and why.
    """

    product: Product
    part: Part
    parts: Mapping[fx.Node, Part]
    cuts: Mapping[fx.Node, Cut]
    stops: Mapping[fx.Node, str]
    tail: Sequence[fx.Node] = ()
    """What follows the product before ranks are added up."""

    @property
    def end(self) -> fx.Node:
        """The value that the sum over ranks replaces."""
        return self.tail[-1] if self.tail else self.product.node

    @property
    def attentions(self) -> list[fx.Node]:
        return [n for n in self.parts if nodes.view(n) is not None]

    @property
    def parameters(self) -> list[fx.Node]:
        return [n for n in self.cuts if n.op == "placeholder"]


class Regions:
    """Finds regions of one graph for so many ranks."""

    def __init__(self, graph: ProgramGraph, meaning: Meaning, ranks: int) -> None:
        self.graph, self.meaning, self.ranks = graph, meaning, ranks
        self.demand = Demand(meaning, ranks)
        self.tails = Tails(graph, meaning, lambda node: self.parameter_of(node, chosen=True) is not None)
        self.given: dict[fx.Node, Input] = graph.given()

    def is_parameter(self, node: fx.Node) -> bool:
        return node in self.given and self.given[node].kind == "parameter"

    def parameter_of(self, node: fx.Node, chosen: bool = False) -> fx.Node | None:
        """The parameter whose elements a value has, moved, or (`chosen`) chosen by integers, as by `W[ids]`;
        None if it has others."""
        while not self.is_parameter(node):
            operands = node.all_input_nodes
            if chosen and not (node.op == "call_function" and self.meaning.is_tensor(node)):
                return None
            if self.meaning.category(node) is Category.MOVEMENT and len(operands) == 1:
                (node,) = operands
                continue
            value = any_element(self.meaning, node) if chosen else None
            if value is None or value.op != "read" or not isinstance(value.value, fx.Node):
                return None
            node = value.value
        return node

    def matrices_of(self, node: fx.Node) -> fx.Node | None:
        """The parameter whose elements a weight has: moved, or matrices of it that integers choose, such as
        those of each token's expert. (Rows that integers choose are values of tokens, no weight.)"""
        found = self.parameter_of(node)
        if found is not None:
            return found
        chosen = self.parameter_of(node, chosen=True)
        return chosen if chosen is not None and len(self.meaning.shape(chosen)) > 2 else None

    def products(self, node: fx.Node) -> Iterator[Product]:
        """The ways to see a node as a sum over a dimension that it shares with a weight."""
        if node.op != "call_function" or category(self.meaning, node) is not Category.CONTRACTION:
            return
        value = any_element(self.meaning, node)
        found = None if value is None else sum_of_products(value)
        if found is None or found.factor != 1 or (found.added is not None and found.added.op != "read"):
            return
        bias, reads = None if found.added is None else found.added.value, found.factors
        for variable in found.summed:
            places = [[d for d, i in enumerate(r.args) if i is variable] for r in reads]
            if variable.args[0].op != "const" or any(len(p) != 1 for p in places):
                continue
            for a, b in ((0, 1), (1, 0)):
                parameter = self.matrices_of(reads[b].value)
                if parameter is not None and self.matrices_of(reads[a].value) is None:
                    yield Product(
                        node, int(variable.args[0].value), reads[a].value, places[a][0], reads[b].value,
                        places[b][0], parameter, bias,
                    )  # fmt: skip

    def grow(self, product: Product) -> Region:
        """The region that ends with a product.

        Raises:
            Unplaced: it cannot be computed by parts, or nothing would be saved.
        """
        if product.extent % self.ranks:
            raise Unplaced(f"{product.extent} units cannot be divided among {self.ranks} ranks")
        blocks = Table.blocks(product.extent, self.ranks)
        region = self._kept(product, product.part(blocks))
        products = (n for n in region.parts if category(self.meaning, n) is Category.CONTRACTION)
        operands = (n for product in products for n in product.all_input_nodes if self.meaning.is_tensor(n))
        divides_one = any(self.matrices_of(n) is not None for n in operands)
        if product.parameter not in region.cuts or not divides_one:
            because = next((f": {r}" for r in region.stops.values() if r), "")
            raise Unplaced(f"its input is needed whole{because}")
        if not region.attentions:
            self._require_own(region)
        return region

    def _require_own(self, region: Region) -> None:
        """Raise Unplaced where hidden units are needed, or computed from values, beside the two products."""
        inside = {*region.parts, region.product.node}
        for node, part in region.parts.items():
            if any(user not in inside and not inside.issuperset(user.users) for user in node.users):
                raise Unplaced("its input is needed whole elsewhere")
            for use in (*part, *region.part):
                if use.operand in region.cuts or not is_cut(use.cut):
                    continue
                kinds = {self.given[n].kind for n in computed_from([use.operand]) if n in self.given}
                if not kinds.isdisjoint(("parameter", "argument")):  # not from places and constants alone
                    raise Unplaced("its input is needed whole elsewhere")

    def followed(self, part: Part) -> tuple[dict[fx.Node, Part], dict[fx.Node, Cut], dict[fx.Node, str]]:
        """What is demanded of the values before a product, how it is computed, and where that ends and
        why."""
        order = {node: place for place, node in enumerate(self.graph.graph.nodes)}
        demands: dict[fx.Node, list[Cut]] = {}
        queue: list[tuple[int, fx.Node]] = []

        def ask(uses: Part) -> None:
            for use in uses:
                if use.operand not in demands:
                    heapq.heappush(queue, (-order[use.operand], use.operand))
                demands.setdefault(use.operand, []).append(use.cut)

        ask(part)
        parts: dict[fx.Node, Part] = {}
        cuts: dict[fx.Node, Cut] = {}
        stops: dict[fx.Node, str] = {}
        while queue:
            _, node = heapq.heappop(queue)
            cut = united(demands[node])
            if cut is None:
                raise Unplaced("ranks would have unequally many rows of a projection")
            cuts[node] = cut
            if node.op != "call_function":
                continue
            moves = self.meaning.category(node) in ELEMENTWISE or attention_of(node) is not None
            if not (is_cut(cut) or moves):
                stops[node] = "every rank needs all of it" if cut else ""
                continue
            try:
                parts[node] = self.demand.part(node, cut)
            except Unplaced as problem:
                if is_cut(cut):
                    where = source_of(node)
                    stops[node] = f"{problem}{f' ({where})' if where else ''}"
                continue
            ask(parts[node])
        return parts, cuts, stops

    def _kept(self, product: Product, part: Part) -> Region:
        """The region that ends with such a part, without what every rank has whole."""
        parts, cuts, stops = self.followed(part)
        inside: dict[fx.Node, Cut] = {
            n: {d: t for d, t in c.items() if not t.is_same}
            for n, c in cuts.items()
            if self.is_parameter(n) and is_cut(c)
        }
        kept: dict[fx.Node, Part] = {}
        for node in reversed(list(parts)):  # operands first
            if is_cut(cuts[node]) or any(u.operand in inside for u in parts[node]):
                kept[node] = parts[node]
                inside[node] = cuts[node]
        return Region(product, part, kept, inside, stops, self.tail(product))

    def tail(self, product: Product) -> list[fx.Node]:
        """What follows a product before ranks are added up. Its bias comes first, if it is one of weights."""
        is_other = product.bias is not None and self.parameter_of(product.bias, chosen=True) is None
        return [] if is_other else self.tails.of(product.node)

    def weights_before(self, node: fx.Node) -> Iterator[fx.Node]:
        """The matrices of the last products that a value is computed from."""

        def matrices(node: fx.Node) -> list[fx.Node]:
            operands = node.all_input_nodes if node.op == "call_function" else ()
            parameters = (self.parameter_of(n) for n in operands if self.meaning.is_tensor(n))
            return [p for p in parameters if p is not None and len(self.meaning.shape(p)) > 1]

        for before in reached([node], lambda n: () if matrices(n) else n.all_input_nodes):
            yield from matrices(before)
