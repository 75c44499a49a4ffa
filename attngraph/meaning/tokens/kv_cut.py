"""What a decoder keeps of every token: a minimum cut between the tokens and the operands of attention.

Keys, values and what masks read of a token are needed again by later tokens. Any cut through the values that
they are computed from would do; chosen is the one of fewest bytes, among values of which the operands are
only views (`networkx.minimum_cut`, each value an edge with its bytes per token as capacity). So key/value
heads are kept before they are repeated, keys that are also values once, and parts that are joined by `cat`
separately if several heads share one of them.
"""

import math
from collections.abc import Iterable

import networkx as nx
import torch
from torch import Tensor, fx

from attngraph.errors import NoDecoderError
from attngraph.meaning.rule import RULES, Category
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.tokens import Tokens

_FEWER_STEPS = 1.0 / (1 << 20)
"""Of cuts with equal bytes, prefer the one nearest to the operands: least work remains when they are read."""

UNKNOWN_WIDTH = (
    "how many values a token has follows from the call alone, where attention reads the model's input "
    "itself, so there is no knowing how much to keep"
)


def choose_kept(tokens: Tokens, operands: Iterable[fx.Node]) -> list[fx.Node]:
    """The values to keep, in the graph's order, such that every operand is a view of them.

    Raises:
        NoDecoderError: no set of values has a known number of bytes for each token.
    """
    wanted = list(dict.fromkeys(operands))
    flow = nx.DiGraph()
    seen: set[fx.Node] = set()
    stack = [(node, 0) for node in wanted]
    for node in wanted:
        flow.add_edge(("out", node), "operands")
    while stack:
        node, depth = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        capacity = bytes_per_token(tokens, node)
        if capacity is None:
            flow.add_edge(("in", node), ("out", node))
        else:
            flow.add_edge(("in", node), ("out", node), capacity=capacity + depth * _FEWER_STEPS)
        before = _moved_from(tokens, node)
        if not before:
            flow.add_edge("tokens", ("in", node))
        for operand in before:
            flow.add_edge(("out", operand), ("in", node))
            stack.append((operand, depth + 1))
    if not wanted:
        return []
    try:
        _, (reachable, _) = nx.minimum_cut(flow, "tokens", "operands")
    except nx.NetworkXUnbounded as problem:
        raise NoDecoderError(UNKNOWN_WIDTH) from problem
    kept = {n for n in seen if ("in", n) in reachable and ("out", n) not in reachable}
    return [n for n in tokens.graph.graph.nodes if n in kept]


def bytes_per_token(tokens: Tokens, node: fx.Node) -> int | None:
    """How many bytes of a value belong to one token; None unless tokens have a dimension of their own, and
    so do sequences."""
    fact, space = tokens[node], tokens.space
    value = node.meta.get("val")
    plain = [digits for digits in fact.axes if digits]
    rows = [(space.row,)] if space.row is not None else []
    if not isinstance(value, Tensor) or sorted(map(str, plain)) != sorted(map(str, [*rows, (space.token,)])):
        return None
    own = [n for n, digits in zip(value.shape, fact.axes, strict=True) if not digits]
    if not all(isinstance(n, int) for n in own):
        return None
    return math.prod(own) * value.dtype.itemsize


def moved_operands(tokens: Tokens, node: fx.Node) -> list[fx.Node]:
    """The tensors that a node rearranges, without those that only say how: the places that it picks."""
    operands = [n for n in node.all_input_nodes if n in tokens.facts]
    return [n for n in operands if not _picks(tokens, n)]


def _picks(tokens: Tokens, node: fx.Node) -> bool:
    """Whether a value holds integers that are the same for all tokens and sequences: a list of heads, say."""
    fact, value = tokens[node], node.meta.get("val")
    fixed = fact.kind is Kind.FIXED and not any(fact.axes)
    return fixed and isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)


def _moved_from(tokens: Tokens, node: fx.Node) -> list[fx.Node]:
    """The token-wise values that this one only rearranges; empty if it computes something."""
    name = str(node.target)
    if node.op != "call_function" or name not in RULES or RULES[name].category is not Category.MOVEMENT:
        return []
    before = moved_operands(tokens, node)
    dtypes = {n.meta["val"].dtype for n in (*before, node)}
    if len(dtypes) > 1 or any(tokens[n].kind is not Kind.TOKEN for n in before):
        return []
    return before
