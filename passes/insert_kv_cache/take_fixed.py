"""Values that do not depend on the tokens (an encoder, keys computed from it) move into the prompt's stage.

The stage runs once per prompt; the graph of a step gets its results as inputs. The graph is cut where such a
value is used together with one that depends on the tokens, if it depends on other arguments of the model:
values computed from weights alone are not moved.
"""

from typing import Any

import torch
from torch import fx

from attngraph.errors import NoDecoderError
from attngraph.ir.graph import ProgramGraph, Rate, is_size, op_name, part_of, source_of
from attngraph.ir.language.expr import Expr
from attngraph.ir.ops import nodes
from attngraph.ir.ops.cached_attention import Fixed
from attngraph.meaning.algebra.sizes import evaluate_size, size_expression
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.step import StepInputs

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
            place = self.tokens.row_dim(node) if self.space.row is not None else None
            own, together = 1, True
            if place is None:
                place = self.row_dims.get(node)
            elif len(digits := self.tokens[node].axes[place]) > 1:
                rest = next(d for d in digits if d is not self.space.row)
                own = int(evaluate_size(rest.args[0], self.graph.hints))
                together = digits[0] is self.space.row
            self.found[node] = Fixed(f"fixed{len(self.found)}", place, own, together)
        return self.inputs.fixed(self.found[node].name, node.meta["val"])

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
        facts = self.tokens.facts
        dynamic = {
            n for n, given in self.graph.given().items()
            if given.kind == "argument" and n in facts and not self.tokens.depends_on_tokens(n)
        }  # fmt: skip
        for node in self.graph.graph.nodes:
            fixed = facts[node].kind is Kind.FIXED if node in facts else is_size(node)
            if fixed and any(n in dynamic for n in node.all_input_nodes):
                dynamic.add(node)
        for node in list(self.graph.graph.nodes):
            if node not in dynamic and node.op not in ("output", "placeholder"):
                for operand in (n for n in node.all_input_nodes if n in dynamic):
                    node.replace_input_with(operand, self._taken(node, operand))
        if self.found:
            values = {about.name: node for node, about in self.found.items()}
            stage = part_of(self.graph, values)
            self._measure_own_arguments(stage)
            self.graph.stages[Rate.PROMPT] = stage

    def _measure_own_arguments(self, stage: ProgramGraph) -> None:
        """Take sizes that tokens share with the prompt's arguments from these: the stage has no tokens."""
        told, inputs = self.graph.given()[self.ids], stage.given().items()
        others = [n for n, given in inputs if given.kind == "argument" and given != told]
        found = {
            str(extent): (node, dim) for node in others for dim, extent in enumerate(node.meta["val"].shape)
        }
        for ids in (n for n, given in inputs if given == told):
            for size in [u for u in ids.users if u.target is aten.sym_size.int]:
                if str(size.meta["val"]) in found:
                    size.args = found[str(size.meta["val"])]
        stage.drop_inputs(lambda node, given: given == told and not node.users)

    def _taken(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        """The node that replaces a fixed operand in the graph of a step."""
        if is_size(operand):
            size = self.meaning.renamed(size_expression(operand.meta["val"]))
            return Builder(self.graph, node).size(size, self._known_sizes())  # type: ignore[no-any-return]
        rank, made = len(self.tokens[operand].axes), self.value(operand)
        place = self.found[operand].row_dim
        if place is None or isinstance(nodes.view(node), nodes.Cached):
            return made
        # A value per sequence used with values per token: each token selects its own sequence's.
        refused = NoDecoderError(f"{op_name(node)} at {source_of(node)}: uses a value of each sequence.")
        own = self.tokens.facts.get(node)
        if own is None or self.found[operand].own != 1 or len(own.axes) < rank:
            raise refused
        builder, more = Builder(self.graph, node), len(own.axes) - rank
        made, place = builder.unsqueezed(made, *[0] * more), place + more
        target = self.tokens.token_dim(node)
        if target is None or made.meta["val"].shape[target] != 1 or len(own.axes[target]) > 1:
            raise refused
        made = builder.call(aten.index_select.default, made, place, self.inputs.rows("row"))
        return builder.call(aten.transpose.int, made, place, target)

    def _known_sizes(self) -> dict[Expr, Any]:
        """Known size expressions, each with a node and the dimension that has it."""
        found: dict[Expr, Any] = {self.space.tokens: (self.ids, self.tokens.token_dim(self.ids))}
        if self.space.row is not None:
            found[self.space.rows] = (self.ids, self.tokens.row_dim(self.ids))
        for node, fixed in self.found.items():
            made = self.inputs[fixed.name]
            for dim, extent in enumerate(node.meta["val"].shape):
                if not isinstance(extent, int) and dim != fixed.row_dim:
                    found.setdefault(self.meaning.renamed(size_expression(extent)), (made, dim))
        return found
