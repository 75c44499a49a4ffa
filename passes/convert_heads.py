"""ConvertHeads: multi-head attention on fewer key/value heads, by mean pooling.

Each group of key/value heads (neighbours, unless groups are given) becomes one, whose projection weights (and
biases) are the mean of theirs (Ainslie et al. 2023, GQA, section 2.1). Which rows of which parameter make a
head is found by meaning: the elements of the attention's keys and values are traced, through operations on
each head (rotary positions, norms), to the product with a parameter that they come from. That product then
has only the pooled rows, and attention reads one head of each group. This changes what the model computes, so
it is not part of compiling: `attngraph.convert_heads` runs it. Refuses a model with an attention that was not
recognised, parameters with other uses, and heads that are treated differently between the projection and the
attention.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.errors import ConversionError
from attngraph.ir.graph import Input, Level, ProgramGraph, Rate, infer, op_name, source_of
from attngraph.ir.graph.program_graph import move_to_stage, replace_in_other_users
from attngraph.ir.language import E
from attngraph.ir.ops.nodes import Attention
from attngraph.ir.walk import reached
from attngraph.meaning import ELEMENTWISE, Category, M, Meaning, Unliftable
from attngraph.meaning.check.comparison import compare, elementwise
from attngraph.meaning.check.region import region
from attngraph.meaning.check.sample import Sample
from attngraph.passes.build import Builder
from attngraph.pipeline import Outcome

aten = torch.ops.aten
_END = 2**63 - 1
_EQUAL = elementwise(1e-9)


@dataclasses.dataclass(frozen=True)
class ConvertHeads:
    """`kv_heads`: the number of key/value heads that each attention gets. `groups`: which heads become one;
    empty: neighbours, as many in each group."""

    kv_heads: int
    groups: tuple[tuple[int, ...], ...] = ()
    name: str = "convert-heads"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        conversion = _Conversion(graph, self.kv_heads, self.groups)
        outcome = Outcome()
        attentions = graph.attentions()
        if not attentions:
            raise ConversionError("there is no attention in this model that attngraph recognises.")
        for node in attentions:
            conversion.collect(node)
        conversion.pool()
        for node in attentions:
            conversion.share(node)
        conversion.check()
        if conversion.pooled:
            move_to_stage(graph, Rate.WEIGHTS, conversion.pooled)
        graph.clean()
        outcome.notes.append(
            f"{len(attentions)} attention(s) on {self.kv_heads} key/value heads, "
            f"{len(conversion.pooled)} parameter(s) have {conversion.saved} rows fewer"
        )
        return outcome


@dataclasses.dataclass
class _Product:
    """A contraction with a parameter. `feature` is the dimension of its result that corresponds to the
    parameter's dimension `dim`; `groups` lists the features that are pooled into one."""

    node: fx.Node
    feature: int
    weight: fx.Node
    dim: int
    bias: fx.Node | None
    groups: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


class _Conversion:
    def __init__(self, graph: ProgramGraph, kv_heads: int, groups: tuple[tuple[int, ...], ...]) -> None:
        self.graph, self.kv_heads, self.groups = graph, kv_heads, groups
        self.meaning = Meaning.of(graph)
        self.given = graph.given()
        self.products: dict[fx.Node, _Product] = {}
        self.shared: list[tuple[fx.Node, list[tuple[int, ...]]]] = []
        self.pooled: dict[str, fx.Node] = {}
        self.saved = 0

    def collect(self, node: fx.Node) -> None:
        """Find the rows of parameters that make the keys and values of one attention."""
        attention = Attention.of(node)
        heads = int(attention.k.meta["val"].shape[1])
        numbers, has = sorted(itertools.chain(*self.groups)), f"the attention at {source_of(node)} has"
        if self.groups and numbers != list(range(heads)):
            raise ConversionError(
                f"{has} the key/value heads 0 to {heads - 1}, each of which must be in one group; the groups "
                f"have {numbers}."
            )
        if not self.groups and heads % self.kv_heads != 0:
            raise ConversionError(f"{has} {heads} key/value heads, which are no multiple of {self.kv_heads}.")
        if heads == self.kv_heads:
            return
        for operand, what in ((attention.k, "keys"), (attention.v, "values")):
            self._collect(operand, what, heads)

    def _collect(self, operand: fx.Node, what: str, heads: int) -> None:
        node = self._source(operand, what)
        product = self.products.setdefault(node, self._product(node))
        (_, of_head, _, of_width), at = self.meaning.places(operand)
        lifted = self.meaning.lift(
            self.meaning.read(operand, at),
            lambda r: r.value is not node and self.meaning.category(r.value) in ELEMENTWISE,
        )
        per_head: list[list[int]] = []
        for head in range(heads):
            at_head = M.substitute(lifted, {of_head: E.const(head)})
            width = range(int(of_width.args[0].value))
            exact = (M.substitute(at_head, {of_width: E.const(n)}) for n in width)
            reads = [n for element in exact for n in E.reads(element) if n.value is node]
            indices = dict.fromkeys(read.args[product.feature] for read in reads)
            for index in (i for i in indices if i.op != "const"):
                rows = f"which rows make a head of the {what} at {source_of(node)}"
                raise ConversionError(f"{rows} is not known: {index!r}.")
            per_head.append([int(index.value) for index in indices])
        size, every = len(per_head[0]), {row for rows in per_head for row in rows}
        if any(len(rows) != size for rows in per_head) or len(every) != size * heads:
            raise ConversionError(f"heads of the {what} at {source_of(node)} share rows of a parameter.")
        for group in self._groups(heads):
            for rows_of_one in zip(*(per_head[head] for head in group), strict=True):
                for row in rows_of_one:
                    if product.groups.get(row, rows_of_one) != rows_of_one:
                        raise ConversionError(f"two attentions share the projection at {source_of(node)}.")
                    product.groups[row] = rows_of_one

    def _groups(self, heads: int) -> list[tuple[int, ...]]:
        """The heads that become one, for an attention with so many."""
        size = heads // self.kv_heads
        neighbours = [tuple(range(first, first + size)) for first in range(0, heads, size)]
        return list(self.groups) or neighbours

    def _source(self, operand: fx.Node, what: str) -> fx.Node:
        """The single product with a parameter that an operand is computed from."""

        def is_product(node: fx.Node) -> bool:
            called = node.op == "call_function" and self.meaning.category(node) is Category.CONTRACTION
            return called and bool(self._parameters(node))

        before = reached([operand], lambda n: () if is_product(n) else n.all_input_nodes)
        found = list(filter(is_product, before))
        if len(found) != 1:
            places = ", ".join(source_of(n) for n in found) or "none"
            raise ConversionError(
                f"the {what} at {source_of(operand)} should come from one product with a parameter, "
                f"found: {places}."
            )
        return found[0]

    def _parameters(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in self.given and self.given[n].kind == "parameter"]

    def _product(self, node: fx.Node) -> _Product:
        """The corresponding dimensions of a product's result and its parameter."""
        at, _ = self.meaning.places(node)
        try:
            element = self.meaning.element(node, at)
        except Unliftable as problem:
            raise ConversionError(f"{op_name(node)} at {source_of(node)}: {problem}") from problem
        parameters = self._parameters(node)
        reads = [n for n in E.reads(element) if n.value in parameters]
        weights = [r for r in reads if len(r.args) == 2]
        biases = [r.value for r in reads if len(r.args) == 1]
        places = [(d, at.index(i)) for r in weights for d, i in enumerate(r.args) if i in at]
        if len(weights) != 1 or len(places) != 1 or len(biases) > 1:
            raise ConversionError(f"{op_name(node)} at {source_of(node)} is no product with a matrix.")
        ((dim, feature),) = places
        weight = weights[0].value
        bias = biases[0] if biases else None
        for parameter in (weight, bias):
            if parameter is not None and list(parameter.users) != [node]:
                name = self.given[parameter].label
                raise ConversionError(f"{name} is used in several places of the model.")
        return _Product(node, feature, weight, dim, bias)

    def pool(self) -> None:
        """Give every product the pooled rows, and expand its result to the old heads and order."""
        for number, product in enumerate(self.products.values()):
            if not product.groups:
                continue
            count = int(product.weight.meta["val"].shape[product.dim])
            groups = list(dict.fromkeys(product.groups.get(row, (row,)) for row in range(count)))
            place = {row: new for new, group in enumerate(groups) for row in group}
            for parameter, dim in ((product.weight, product.dim), (product.bias, 0)):
                if parameter is not None:
                    pooled = self._pooled(product.node, parameter, dim, groups)
                    product.node.replace_input_with(parameter, pooled)
                    self.saved += count - len(groups)
            node = product.node
            node.meta["val"] = infer(node.target, node.args, node.kwargs, self.graph.fake_mode())
            order = self._constant(f"heads_{number}", torch.tensor([place[row] for row in range(count)]))
            builder = Builder(self.graph, node.next, rewritten=node)
            made = builder.call(aten.index_select.default, node, product.feature, order)
            replace_in_other_users(node, made)

    def _pooled(
        self, user: fx.Node, parameter: fx.Node, dim: int, groups: Sequence[tuple[int, ...]]
    ) -> fx.Node:
        """The parameter with the mean of each group's entries along `dim`."""
        builder = Builder(self.graph, user)
        runs = []
        for size, same in itertools.groupby(groups, key=len):
            members = list(same)
            places = torch.tensor([place for group in members for place in group])
            order = self._constant(f"groups_{len(self.graph.constants)}", places)

            def mean(parameter: Any, order: Any, count: int = len(members), size: int = size) -> Any:
                rows = parameter.index_select(dim, order)
                return rows if size == 1 else rows.unflatten(dim, [count, size]).mean([dim + 1])

            runs.append(builder.trace(mean, parameter, order))
        made = self.pooled[self.given[parameter].name] = builder.side_by_side(runs, dim)
        return made

    def _constant(self, name: str, value: Tensor) -> fx.Node:
        device = self.graph.placeholders()[-1].meta["val"].device
        self.graph.constants[name] = value.to(device)
        fake = self.graph.empty(value.shape, value.dtype, device)
        return self.graph.add_input(Input("constant", name), fake, name)

    def share(self, node: fx.Node) -> None:
        """Let an attention read one head of each group. Where groups are not neighbours or not equally large,
        these heads are repeated for it, which costs a cache nothing."""
        attention = Attention.of(node)
        groups = self._groups(int(attention.k.meta["val"].shape[1]))
        size = len(groups[0])
        if all(len(group) == 1 for group in groups):
            return
        self.shared += [(x, groups) for x in attention.keys]
        builder = Builder(self.graph, node)
        if groups == [tuple(range(n * size, n * size + size)) for n in range(len(groups))]:
            k, v = (builder.call(aten.slice.Tensor, x, 1, 0, _END, size) for x in attention.keys)
            node.meta["attention"] = dataclasses.replace(node.meta["attention"], kv_heads=self.kv_heads)
        else:
            group_of = {head: number for number, group in enumerate(groups) for head in group}
            first = [group[0] for group in groups]
            again = [group_of[head] for head in range(len(group_of))]
            k, v = (_picked(builder, _picked(builder, x, first), again) for x in attention.keys)
        node.args = attention.replace(k=k, v=v).args

    def check(self) -> None:
        """Check that the heads of a group are equal, so that operations on the way treat them alike."""
        given = ((n, i.name) for n, i in self.graph.given().items() if i.kind == "constant")
        known = self.graph.known_values() | {n: self.graph.constants[name] for n, name in given}
        for operand, groups in self.shared:
            sample = Sample(known, self.graph.hints, 0)
            with torch.no_grad():
                (found,) = sample.evaluate(region([operand], []), {}, operand)
            heads = found[:, [head for group in groups for head in group]]
            first = found[:, [group[0] for group in groups for _ in group]]
            if not compare(heads, first, _EQUAL).holds:
                raise ConversionError(
                    f"heads are treated unlike each other before attention at {source_of(operand)}, so "
                    "the mean of their projections stands for none of them."
                )


def _picked(builder: Builder, value: fx.Node, heads: Sequence[int]) -> fx.Node:
    """These heads of keys or values: views, joined."""
    return builder.side_by_side([builder.call(aten.narrow.default, value, 1, n, 1) for n in heads], 1)
