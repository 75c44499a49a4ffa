"""The tokens of which a graph has results: of every one, then of those that are wanted.

A model may return the logits of the last token alone (`head(x[:, [-1]])`). What it computes after it has
picked that token treats the rows of the batch alike and apart. So it can be computed for every token, each
taken as a row of its own: of the value that the last token is picked from, tokens become rows, and at the
end rows become tokens again. That rows do not meet is verified afterwards, by the analysis of the rewritten
graph.

Of a prompt usually only the last token's logits are needed, and the output head is a large part of the work.
So the tokens are selected at the first value after the last attention on which the result depends alone. Used
by `insert_kv_cache`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import Tensor, fx

from attngraph.ir.graph import ProgramGraph, computed_from, is_size, op_name, source_of
from attngraph.ir.language import E, Expr
from attngraph.ir.ops import nodes
from attngraph.ir.walk import reached
from attngraph.meaning import M, size_expression, tried
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.insert_kv_cache.free_tokens import resized

aten = torch.ops.aten


class Pick(NamedTuple):
    """A node that picks the last token of `operand`, whose dimensions `row` and `token` hold the sequences
    and the tokens. `keeps`: whether the result has a dimension of one in place of the tokens."""

    node: fx.Node
    operand: fx.Node
    row: int
    token: int
    keeps: bool


def give_every_token(graph: ProgramGraph, tokens: Tokens) -> str:
    """Rewrite the graph so that its result is for every token, `[rows, tokens, ...]`, if it is for the last
    one alone. Returns where that one was picked; "" if the graph is unchanged."""
    (result,) = graph.results()
    if tokens[result].kind is not Kind.MIXING:
        return ""
    pick = _last_token(tokens, tokens.cause(result))
    if pick is None:
        return ""
    after, above = set(reached(pick.node.users, lambda n: n.users)), computed_from([result])
    tail = [n for n in graph.graph.nodes if n in after and n in above]
    first, *others = tokens.meaning.shape(result)
    plain = others and all(isinstance(n, int) for n in result.meta["val"].shape[1:])
    alike = all(_is_alike(tokens, node, tail, pick) for node in tail)
    if first is not tokens.space.rows or not plain or not alike:
        return ""
    ids = next(n for n in tokens.facts if n.op == "placeholder" and tokens[n].kind is Kind.TOKEN)
    ends: Builder = Builder(graph, graph.graph.output_node())
    made = _as_rows(Builder(graph, pick.node), pick)
    sizes: dict[Expr, Any] = {tokens.space.rows: (made, min(pick.row, pick.token))}
    for node in tail:
        node.replace_input_with(pick.node, made)
        resized(tokens, node, sizes)
    last = made if result is pick.node else result
    rest = [int(n) for n in last.meta["val"].shape[1:]]
    rest = rest[1:] if pick.keeps and rest[:1] == [1] else rest
    shape = [ends.call(aten.sym_size.int, ids, dim) for dim in (0, 1)]
    graph.graph.output_node().args = ((ends.call(aten.reshape.default, last, [*shape, *rest]),),)
    return f"{op_name(pick.node)} at {source_of(pick.node)}"


def _last_token(tokens: Tokens, node: fx.Node) -> Pick | None:
    """How a node picks the last token of its operand; None if it does something else."""
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    _, at = tokens.meaning.places(node)
    element, space = tried(tokens.meaning.element, node, at), tokens.space
    if element is None or element.op != "read" or not isinstance(element.value, fx.Node):
        return None
    operand, fact = element.value, tokens[element.value]
    if fact.kind is not Kind.TOKEN or space.row is None:
        return None
    if (space.token,) not in fact.axes or (space.row,) not in fact.axes:
        return None
    token, row = fact.axes.index((space.token,)), fact.axes.index((space.row,))
    others = [index for dim, index in enumerate(element.args) if dim != token]
    if M.sub(element.args[token], space.tokens) is not E.const(-1):
        return None
    if not all(isinstance(n, int) for d, n in enumerate(operand.meta["val"].shape) if d not in (token, row)):
        return None
    keeps = len(at) == len(element.args)
    own: list[Expr] = [index for dim, index in enumerate(at) if not (keeps and dim == token)]
    if others != own or (keeps and at[token] is not E.ZERO):
        return None
    return Pick(node, operand, row, token, keeps)


def _is_alike(tokens: Tokens, node: fx.Node, tail: list[fx.Node], pick: Pick) -> bool:
    """Whether a node after the pick depends on nothing else that belongs to rows or tokens."""
    others = [n for n in node.all_input_nodes if n not in tail and n is not pick.node]
    sizes = [tokens.meaning.renamed(size_expression(n.meta["val"])) for n in others if is_size(n)]
    counted = any(map(tokens.space.counts_tokens, sizes))
    return not counted and all(tokens[n].is_shared for n in others if not is_size(n))


def _as_rows(builder: Builder, pick: Pick) -> fx.Node:
    """The operand with every token as a row: tokens stand behind their sequence, and are joined with it."""
    row, token = pick.row, pick.token
    extents = pick.operand.meta["val"].shape
    order = [dim for dim in range(len(extents)) if dim not in (row, token)]
    place = row if row < token else row - 1
    order[place:place] = [row, token]
    shape = [-1 if dim == row else int(extents[dim]) for dim in order if dim != token]
    joined: fx.Node = builder.trace(lambda x: x.permute(order).reshape(shape), pick.operand)
    return builder.unsqueezed(joined, token) if pick.keeps else joined


def pick_results(graph: ProgramGraph, tokens: Tokens, kept: Sequence[fx.Node], picked: fx.Node) -> None:
    """Compute the result only for the tokens at the indices `picked`, selecting as early as possible; does
    nothing where there is no place to select. `kept`: values that are needed for every token."""
    space = tokens.space
    (result,) = graph.results()
    for node, tail in _bottlenecks(tokens, result, kept):
        place, row = tokens.token_dim(node), tokens.row_dim(node)
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

    def before(node: fx.Node) -> list[fx.Node]:
        facts = ((n, tokens.facts.get(n)) for n in node.all_input_nodes)
        return [n for n, f in facts if f is not None and f.kind not in (Kind.FIXED, Kind.POSITION)]

    view = nx.DiGraph()
    for node in reached([result], before):
        sources: list[object] = [*before(node)] or ["tokens"]
        view.add_edges_from((operand, node) for operand in sources)
    above = nx.immediate_dominators(view, "tokens")
    chain: list[tuple[fx.Node, set[fx.Node]]] = []
    while isinstance(result, fx.Node):
        tail = nx.descendants(view, result)
        if any(isinstance(nodes.view(n), nodes.Cached) or n in kept for n in tail) or result in kept:
            break
        chain.append((result, tail))
        result = above[result]
    return chain[::-1]
