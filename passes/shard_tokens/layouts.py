"""Which tokens each rank has: so chosen that all ranks have about equally many pairs of a query and a key.

One run of neighbours for each rank, because then a window reaches over the fewest borders. Where that leaves
ranks with unequal work (causal masks), each rank has two runs, one as far from the beginning as the other is
from the end, as far as the number of tokens allows.
"""

import sympy

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops import nodes
from attngraph.ir.ops.token_collectives import Layout
from attngraph.meaning.check.region import numbers_at
from attngraph.meaning.masks.tiles import pairs_of_ranks
from attngraph.meaning.placement.demand import Unplaced
from attngraph.meaning.placement.elements import attention_of
from attngraph.meaning.placement.token_axis import TokenAxis

EVEN = 1.1
"""A rank may have this many times the mean of the pairs before tokens are divided in two runs."""


def one_run(ranks: int) -> Layout:
    """Neighbouring tokens for each rank."""
    return Layout(tuple((rank,) for rank in range(ranks)))


def two_runs(ranks: int) -> Layout:
    """Early and late tokens for each rank."""
    return Layout(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


def choose_layout(graph: ProgramGraph, tokens: TokenAxis, ranks: int) -> Layout:
    """The layout for one size, which from then on must be one that can be divided so.

    Raises:
        Unplaced: the size is a number, or the tokens of the example cannot be divided equally.
    """
    size = tokens.space.tokens
    shapes = (getattr(node.meta.get("val"), "shape", ()) for node in graph.placeholders())
    symbols = [n.node.expr for shape in shapes for n in shape if not isinstance(n, int)]
    symbol = next((s for s in symbols if str(s) == size.value), None)
    total = graph.hints.get(str(size.value), 0)
    if size.op != "size" or symbol is None or not total:
        raise Unplaced(f"its {size!r} queries are no size of the model's inputs")
    if total % ranks:
        graph.conditions = (*graph.conditions, sympy.Ne(sympy.Mod(symbol, ranks), 0))
        raise Unplaced(f"{total} tokens cannot be divided equally among {ranks} ranks")
    found = one_run(ranks)
    uneven = _unevenness(graph, tokens, found, total)
    if uneven > EVEN:
        if total % (2 * ranks):
            graph.conditions = (*graph.conditions, sympy.Ne(sympy.Mod(symbol, 2 * ranks), 0))
        elif _unevenness(graph, tokens, two_runs(ranks), total) < uneven:
            found = two_runs(ranks)
    graph.conditions = (*graph.conditions, sympy.Eq(sympy.Mod(symbol, found.count), 0))
    return found


def pairs(graph: ProgramGraph, tokens: TokenAxis, layout: Layout, total: int) -> list[float]:
    """About how many pairs of a query and a key each rank computes, of all attentions whose queries and keys
    are these tokens."""
    every = []
    for node in graph.attentions():
        view = nodes.AttentionOp.of(node)
        keys = tokens.meaning.shape(view.keys[0])[2]
        divided = (n for n in (node, *node.users) if n in tokens.axes)
        if keys is tokens.space.tokens and node in map(attention_of, divided):
            sizes = numbers_at(view.sizes, graph.hints)
            every.append(pairs_of_ranks(view.program, sizes, layout, total))
    return [sum(of) for of in zip(*every, strict=True)] or [1.0] * layout.ranks


def _unevenness(graph: ProgramGraph, tokens: TokenAxis, layout: Layout, total: int) -> float:
    """How many times the mean of the pairs the busiest rank has."""
    found = pairs(graph, tokens, layout, total)
    return max(found) * len(found) / max(sum(found), 1.0)
