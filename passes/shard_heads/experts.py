"""Mixtures of experts, divided by expert: a rank has some of the experts, whole.

An expert's product is one of tokens that are sorted by expert, with the weight of each token's own expert. Of
the last of such products each rank computes the rows of its own experts (`attngraph::expert_rows`), and zero
elsewhere, so ranks are added up where they would be if hidden units were divided. What the last is computed
from needs to be right in those rows alone, as long as a row depends on nothing but itself. So earlier
products with the same sorted tokens are computed for the same experts, and what stands between them is left
as it is: it is followed back by the element rules, whatever operations that are.

Where there are no more experts than ranks, or unequally many, hidden units are divided instead.
"""

from torch import fx

from attngraph.ir.graph import module_of, source_of
from attngraph.ir.language import E
from attngraph.ir.ops.others import EXPERT_ROWS
from attngraph.meaning.check.ranks import RankChecks
from attngraph.meaning.placement.demand import Unplaced, Use
from attngraph.meaning.placement.elements import element, grouped, independent_dims
from attngraph.meaning.placement.regions import Product, Regions
from attngraph.meaning.placement.table import Cut, Table
from attngraph.meaning.rule import Unliftable, is_part
from attngraph.passes.build import Builder
from attngraph.passes.shard_heads.parts import Parts
from attngraph.report.ranks import DividedEntry

Mixture = tuple[Product, int, list[fx.Node]]
"""The last product of a mixture, its experts, and the rows of tokens before it, operands first."""


class Experts:
    """Divides the mixtures of one graph."""

    def __init__(self, regions: Regions, parts: Parts, checks: RankChecks) -> None:
        self.graph, self.regions, self.parts, self.checks = regions.graph, regions, parts, checks
        self.meaning, self.ranks = regions.meaning, regions.ranks

    def divide(self, decided: dict[fx.Node, Cut]) -> list[DividedEntry]:
        """Divide what can be divided, and note in `decided` what ranks have of its weights."""
        found = []
        for node in reversed(list(self.graph.graph.nodes)):
            mixture = self._mixture(node) if node.users else None
            if mixture is None:
                continue
            try:
                made, cuts = self._made(mixture, decided)
                end = self.regions.tail(mixture[0])[-1:] or [node]
                if self.checks.same_value(end[0], made, [*self.parts.whole, *cuts]).problem:
                    continue
            except Unplaced:
                continue
            decided.update(cuts)
            end[0].replace_all_uses_with(made)
            self.meaning.forget_elements()
            self.graph.clean()
            found.append(DividedEntry("experts", module_of(node), source_of(node), mixture[1]))
        return found[::-1]

    # --- finding ---

    def _mixture(self, last: fx.Node) -> Mixture | None:
        """The mixture that ends with a node, if ranks can have equally many experts, and more than one."""
        told = grouped(last)
        product = next(self.regions.products(last), None) if told is not None else None
        if told is None or product is None:
            return None
        experts = self.meaning.shape(told.weight)[0]
        if experts.op != "const" or experts.value % self.ranks or experts.value == self.ranks:
            return None
        reached: dict[fx.Node, bool] = {}
        if not self._reaches(told.x, told.ends, reached):
            return None
        inside = sorted(n for n, found in reached.items() if found)
        if any(user is not last and not reached.get(user) for node in inside for user in node.users):
            return None
        return product, int(experts.value), inside

    def _reaches(self, node: fx.Node, ends: fx.Node, known: dict[fx.Node, bool]) -> bool:
        """Whether a node's rows are computed, each from the same row, from a product of the same tokens."""
        if node not in known:
            known[node] = False
            told = grouped(node)
            if told is not None and told.ends is ends:
                known[node] = self.regions.parameter_of(told.weight) is not None
            elif node.op == "call_function":
                operands = [n for n in node.all_input_nodes if self._reaches(n, ends, known)]
                known[node] = bool(operands) and self._is_by_rows(node, operands)
        return known[node]

    def _is_by_rows(self, node: fx.Node, operands: list[fx.Node]) -> bool:
        """Whether a row reads the same row of these operands alone; of several results each is asked."""
        if isinstance(node.meta.get("val"), (tuple, list)):
            return True
        if is_part(node):
            operands = operands[0].all_input_nodes
        first = independent_dims(node)
        if first is not None:
            return first > 0 and operands == [node.args[0]]
        try:
            at, places = self.meaning.places(node)
            value = element(self.meaning, node, places)
        except Unliftable:
            return False
        return all(r.args and r.args[0] is at[0] for r in E.reads(value) if r.value in operands)

    # --- building ---

    def _made(self, mixture: Mixture, decided: dict[fx.Node, Cut]) -> tuple[fx.Node, dict[fx.Node, Cut]]:
        """What ranks compute for a mixture, and what they have of its parameters."""
        self.parts.begin()
        (product, experts, inside), last = mixture, mixture[0].node
        blocks = Table.blocks(experts, self.ranks)
        cuts: dict[fx.Node, Cut] = {}
        first = self.parts.number("experts", blocks.places[:, :1])
        twins: dict[fx.Node, fx.Node] = {}

        def operand(node: fx.Node) -> fx.Node:
            return twins[node] if node in twins else self.parts.enter(node)

        for node in (*inside, last):
            told, builder = grouped(node), Builder(self.graph, node)
            if told is None or not (node is last or self.regions.parameter_of(told.weight) is not None):
                twins[node] = builder.again(node, operand)
                continue
            chain, demanded, _ = self.regions.followed((Use(told.weight, {0: blocks}),))
            own = {n: c for n, c in demanded.items() if self.regions.is_parameter(n)}
            if any(decided.get(n, c) != c or cuts.get(n, c) != c for n, c in own.items()):
                raise Unplaced("its parameters are divided otherwise elsewhere")
            cuts.update(own)
            self.parts.build(dict(reversed(chain.items())), own | {n: demanded[n] for n in chain})
            weight = self.parts.twins[told.weight]
            twins[node] = builder.call(EXPERT_ROWS, operand(told.x), weight, operand(told.ends), first)
        return self.parts.added(product, twins[last], self.regions.tail(product)), cuts
