"""Only the results that are wanted: after the last attention a decoder need not compute the other tokens.

For a prompt usually only the last token's logits are needed, and the output head is a large part of the work.
The tokens are selected at the first value after the last attention on which the result depends alone. Used
by `insert_kv_cache`.
"""

from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language import E, Expr
from attngraph.ir.ops import nodes
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.free_tokens import resized

aten = torch.ops.aten


def pick_results(
    graph: ProgramGraph, tokens: Tokens, ids: fx.Node, kept: Sequence[fx.Node], picked: fx.Node
) -> None:
    """Compute the first result only for the tokens at the indices `picked`, selecting as early as possible;
    does nothing where there is no place to select.

    Args:
        kept: values that are needed for every token.
    """
    space = tokens.space
    (result,) = graph.graph.output_node().args[0]  # type: ignore[union-attr, misc, str-unpack]
    assert isinstance(result, fx.Node)
    for node, tail in _bottlenecks(tokens, result, kept):
        place = space.place(tokens[node].axes, space.token)
        others = {n for t in tail for n in t.all_input_nodes if n in tokens.facts} - tail - {node}
        if place is None or not set(tokens[node].axes[place]) <= space.both:
            continue
        if any(any(tokens[n].axes) for n in others):
            continue
        ordered = [n for n in graph.graph.nodes if n in tail]
        builder = Builder(graph, ordered[0] if ordered else graph.graph.output_node())
        made = builder.call(aten.index_select.default, node, place, picked)
        tokens.facts[made] = tokens[node]
        for user in list(node.users):
            if user in tail or (user.op == "output" and not tail):
                user.replace_input_with(node, made)
        sizes: dict[Expr, Any] = {space.tokens: (made, place)}
        row = space.place(tokens[node].axes, space.row)
        one = row is None or row == place  # a step has one sequence
        if not one:
            sizes[space.rows] = (made, row)
        for user in ordered:
            resized(tokens, user, sizes, E.ONE if one else None)
        return


def _bottlenecks(
    tokens: Tokens, result: fx.Node, kept: Sequence[fx.Node]
) -> list[tuple[fx.Node, set[fx.Node]]]:
    """The values after the last attention that all paths lead through, each with the nodes after it."""

    def follows_tokens(node: fx.Node) -> bool:
        fact = tokens.facts.get(node)
        return fact is not None and fact.kind not in (Kind.FIXED, Kind.POSITION)

    view = nx.DiGraph()
    stack, seen = [result], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        before = [n for n in node.all_input_nodes if follows_tokens(n)]
        sources: list[object] = [*before] or ["tokens"]
        view.add_edges_from((operand, node) for operand in sources)
        stack += before
    above = nx.immediate_dominators(view, "tokens")
    chain: list[tuple[fx.Node, set[fx.Node]]] = []
    while isinstance(result, fx.Node):
        tail = nx.descendants(view, result)
        if any(isinstance(nodes.view(n), nodes.Cached) or n in kept for n in tail) or result in kept:
            break
        chain.append((result, tail))
        result = above[result]
    return chain[::-1]
