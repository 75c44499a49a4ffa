"""A running sum over the tokens as attention: the mean of the tokens seen so far, times their number.

`x.cumsum(tokens)` adds up all earlier tokens, so it needs them as attention does. It is attention: with the
same score for all of them each weighs 1 / n, and n times that mean is the sum. Sums of integers are computed
in float64 and rounded, so counts are exact (positions of RoBERTa count the tokens before that are no
padding). Used by `insert_kv_cache`, where a decoder is derived; graphs of whole sequences keep their
`cumsum`.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.graph.source import source_of
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import nodes
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.tokens.axes import Axes
from attngraph.meaning.tokens.facts import Kind
from attngraph.meaning.tokens.tokens import Tokens
from attngraph.passes.build import Builder
from attngraph.passes.fuse_attention import describe

aten = torch.ops.aten
EQUAL_WEIGHTS = parse("s = 0\nkeep k <= q")


def gather_running_sums(graph: ProgramGraph, tokens: Tokens) -> list[str]:
    """Replace every running sum of token-wise values over the tokens; returns where they are."""
    found = [node for node in graph.graph.nodes if _is_running_sum(node, tokens)]
    for node in found:
        _replace(graph, tokens, node)
    return [source_of(node) or node.name for node in found]


def _is_running_sum(node: fx.Node, tokens: Tokens) -> bool:
    """Whether this is a running sum over the tokens of a value whose sequences and tokens are dimensions."""
    if node.target is not aten.cumsum.default or tokens[node].kind is not Kind.MIXING:
        return False
    fact, space = tokens[node.args[0]], tokens.space  # type: ignore[index]
    if fact.kind is not Kind.TOKEN:
        return False
    place, row = space.place(fact.axes, space.token), space.place(fact.axes, space.row)
    alone = [digits for digits in fact.axes if digits]
    wanted = 1 if space.row is None else 2
    along = int(node.args[1]) % len(fact.axes)  # type: ignore[arg-type]
    return (
        place == along
        and len(alone) == wanted
        and len(fact.axes) <= wanted + 2
        and (space.row is None or row is not None)
    )


def _replace(graph: ProgramGraph, tokens: Tokens, node: fx.Node) -> None:
    value: fx.Node = node.args[0]  # type: ignore[assignment]
    builder, dtype = Builder(graph, node), value.meta["val"].dtype
    call, computed = builder.call, _computed_in(dtype)
    order, missing = _arranged(tokens, tokens[value].axes)
    if dtype != computed:
        value = call(aten._to_copy.default, value, dtype=computed)
    value = call(aten.permute.default, value, order)
    for dim in missing:
        value = call(aten.unsqueeze.default, value, dim)
    count = call(aten.arange.default, builder.size(size_expression(value.meta["val"].shape[2])),
                 device=value.meta["val"].device)  # fmt: skip
    count = call(aten.unsqueeze.default, call(aten.add.Tensor, count, 1), 1)
    total = call(aten.mul.Tensor, _mean(builder, value), count)
    total = total if dtype.is_floating_point else call(aten.round.default, total)
    for dim in reversed(missing):
        total = call(aten.squeeze.dim, total, dim)
    total = call(aten.permute.default, total, [order.index(dim) for dim in range(len(order))])
    if total.meta["val"].dtype != node.meta["val"].dtype:
        total = call(aten._to_copy.default, total, dtype=node.meta["val"].dtype)
    node.replace_all_uses_with(total)
    graph.graph.erase_node(node)


def _arranged(tokens: Tokens, axes: Axes) -> tuple[list[int], list[int]]:
    """How dimensions become `[batch, heads, tokens, width]`: their order, and which of the four are missing.
    Dimensions that are neither sequences nor tokens are the width, or heads and width."""
    space = tokens.space
    row, token = space.place(axes, space.row), space.place(axes, space.token)
    own = [dim for dim in range(len(axes)) if dim not in (row, token)]
    four = [row, own[0] if len(own) == 2 else None, token, own[-1] if own else None]
    return [dim for dim in four if dim is not None], [n for n, dim in enumerate(four) if dim is None]


def _mean(builder: Builder, value: fx.Node) -> fx.Node:
    """The mean over this and all earlier tokens, `[B, 1, T, C]`."""
    same = builder.call(aten.full_like.default, value, 0)
    view = nodes.Attention(q=same, k=value, v=value, reads=(), sizes=(), program=EQUAL_WEIGHTS)
    made = builder.attention(view)
    made.meta["attention"] = describe(made, builder.graph.hints)
    return builder.call(operator.getitem, made, 0)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        return torch.float64
    return torch.float32 if dtype.itemsize < 4 else dtype
