"""Values that do not depend on the tokens (an encoder, keys computed from it) move into the prompt's stage.

The stage runs once per prompt; the graph of a step gets its results as inputs. The graph is cut where such a
value is used together with one that depends on the tokens, if it depends on other arguments of the model:
values computed from weights alone are not moved.
"""

from typing import Any

import torch
from torch import fx

from attngraph.errors import NoDecoderError
from attngraph.ir.graph.program_graph import ProgramGraph, Rate, is_size, op_name, part_of
from attngraph.ir.graph.source import source_of
from attngraph.ir.language.expr import Expr
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Fixed
from attngraph.meaning.algebra.sizes import evaluate_size, size_expression
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.step_inputs import StepInputs

aten = torch.ops.aten


class FixedValues:
    """The fixed values of one graph.

    Attributes:
        found: the values that become results of the stage.
        row_dims: the batch dimension of values, where the way scores read them shows it.
    """

    def __init__(self, graph: ProgramGraph, ids: fx.Node, tokens: Tokens, inputs: StepInputs) -> None:
        self.graph, self.ids, self.tokens, self.inputs = graph, ids, tokens, inputs
        self.space, self.meaning = tokens.space, tokens.meaning
        self.row_dims: dict[fx.Node, int] = {}
        self.found: dict[fx.Node, Fixed] = {}

    def value(self, node: fx.Node) -> fx.Node:
        """The input for a value that the prompt's stage computes."""
        if node not in self.found:
            fact = self.tokens[node]
            place = self.space.place(fact.axes, self.space.row) if self.space.row is not None else None
            own, together = 1, True
            if place is None:
                place = self.row_dims.get(node)
            elif len(fact.axes[place]) > 1:
                digits = fact.axes[place]
                rest = next(d for d in digits if d is not self.space.row)
                own = int(evaluate_size(rest.args[0], self.graph.hints))
                together = digits[0] is self.space.row
            self.found[node] = Fixed(f"fixed{len(self.found)}", place, own, together)
        return self.inputs.fixed(self.found[node].name, node.meta["val"])

    def one_row(self, builder: Builder, node: fx.Node) -> fx.Node:
        """The first row, for a value that is the same for all rows."""
        return builder.call(aten.narrow.default, node, 0, 0, 1)

    def rows_of(self, builder: Builder, pages: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The page table and lengths of fixed keys: each row has one page of its own, full from the start."""
        first = self.inputs.rows("first")
        rows = builder.call(aten.sym_size.int, first, 0)
        table = builder.call(aten.arange.default, rows, device=first.meta["val"].device)
        if self.space.row is None:
            table = builder.call(aten.zeros_like.default, table)
        keys = builder.call(aten.sym_size.int, pages, 2)
        held = builder.call(aten.full_like.default, first, keys)
        return builder.call(aten.unsqueeze.default, table, 1), held

    def take(self) -> None:
        """Cut the graph where values that do not depend on the tokens are used with ones that do, if they
        depend on other arguments; values computed from weights alone are not moved."""
        kinds = self.graph.given()
        arguments = {
            n for n, given in kinds.items()
            if given.kind == "argument" and n in self.tokens.facts and not self.tokens.depends_on_tokens(n)
        }  # fmt: skip
        dynamic: set[fx.Node] = set(arguments)
        for node in self.graph.graph.nodes:
            if any(n in dynamic for n in node.all_input_nodes) and self._is_fixed(node):
                dynamic.add(node)
        for node in list(self.graph.graph.nodes):
            if node in dynamic or node.op == "output" or node.op == "placeholder":
                continue
            for operand in node.all_input_nodes:
                if operand not in dynamic:
                    continue
                node.replace_input_with(operand, self._taken(node, operand))
        if self.found:
            values = {about.name: node for node, about in self.found.items()}
            stage = part_of(self.graph, values)
            self._measure_own_arguments(stage)
            self.graph.stages[Rate.PROMPT] = stage

    def _measure_own_arguments(self, stage: ProgramGraph) -> None:
        """Take sizes that tokens share with the prompt's arguments from these: the stage has no tokens."""
        told = self.graph.given()[self.ids]
        inputs = list(zip(stage.placeholders(), stage.inputs, strict=True))
        others = [n for n, given in inputs if given.kind == "argument" and given != told]
        found = {
            str(extent): (node, dim)
            for node in others for dim, extent in enumerate(node.meta["val"].shape)
        }  # fmt: skip
        for ids in (n for n, given in inputs if given == told):
            for size in [u for u in ids.users if u.target is aten.sym_size.int]:
                if str(size.meta["val"]) in found:
                    size.args = found[str(size.meta["val"])]
        stage.drop_inputs(lambda node, given: given == told and not node.users)

    def _is_fixed(self, node: fx.Node) -> bool:
        fact = self.tokens.facts.get(node)
        return is_size(node) if fact is None else fact.kind is Kind.FIXED

    def _taken(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        """The node that replaces a fixed operand in the graph of a step."""
        if is_size(operand):
            size = self.meaning.renamed(size_expression(operand.meta["val"]))
            found: fx.Node = Builder(self.graph, node).size(size, self._known_sizes())
            return found
        fact = self.tokens[operand]
        made = self.value(operand)
        place = self.found[operand].row_dim
        if place is None or isinstance(nodes.view(node), nodes.Cached):
            return made
        # A value per sequence used with values per token: each token selects its own sequence's.
        own, wanted = self.tokens.facts.get(node), self.space.token
        if own is None or self.found[operand].own != 1 or len(own.axes) < len(fact.axes):
            raise NoDecoderError(f"{op_name(node)} at {source_of(node)}: uses a value of each sequence.")
        builder = Builder(self.graph, node)
        for _ in range(len(own.axes) - len(fact.axes)):
            made, place = builder.call(aten.unsqueeze.default, made, 0), place + 1
        target = self.space.place(own.axes, wanted)
        if target is None or made.meta["val"].shape[target] != 1 or len(own.axes[target]) > 1:
            raise NoDecoderError(f"{op_name(node)} at {source_of(node)}: uses a value of each sequence.")
        made = builder.call(aten.index_select.default, made, place, self.inputs.rows("row"))
        return builder.call(aten.transpose.int, made, place, target)

    def _known_sizes(self) -> dict[Expr, Any]:
        """Known size expressions, each with a node and the dimension that has it."""
        axes = self.tokens[self.ids].axes
        found: dict[Expr, Any] = {self.space.tokens: (self.ids, self.space.place(axes, self.space.token))}
        if self.space.row is not None:
            found[self.space.rows] = (self.ids, self.space.place(axes, self.space.row))
        for node, fixed in self.found.items():
            made = self.inputs[fixed.name]
            for dim, extent in enumerate(node.meta["val"].shape):
                if not isinstance(extent, int) and dim != fixed.row_dim:
                    found.setdefault(self.meaning.renamed(size_expression(extent)), (made, dim))
        return found
