"""What ranks that divide tokens fetch of each other, counted on the graph at the example's sizes."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from attngraph.ir.graph import Axis, ProgramGraph, source_of
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.collectives import SUM_GRADIENTS
from attngraph.ir.ops.token_collectives import ALL_TOKENS, FETCH_KEYS, TOKENS, Layout, needed_keys
from attngraph.meaning.check.region import shape_at
from attngraph.meaning.masks.words import describe
from attngraph.passes.shard_tokens.layouts import sizes_of
from attngraph.report.ranks import ContextEntry, DividedTokens, FetchedEntry, WholeEntry


def account(
    graph: ProgramGraph, axis: Axis, axes: Sequence[DividedTokens], whole: Sequence[WholeEntry]
) -> ContextEntry:
    """The report's entry. `axes`: how the tokens are divided, for each size that counts some."""
    sums = [_bytes(n, graph) for n in graph.graph.nodes if _is_along(n, SUM_GRADIENTS, axis)]
    return ContextEntry(axis.count, tuple(axes), tuple(_fetched(graph)), tuple(whole), (len(sums), sum(sums)))


def _is_along(node: fx.Node, op: Any, axis: Axis) -> bool:
    """Whether a node is this collective of the ranks of an axis."""
    return node.target is op and str(node.args[-1]) == axis.group


def _bytes(node: fx.Node, graph: ProgramGraph) -> int:
    value = node.meta["val"]
    return math.prod(shape_at(value, graph.hints)) * value.dtype.itemsize if isinstance(value, Tensor) else 0


def _fetched(graph: ProgramGraph) -> Iterator[FetchedEntry]:
    for node in graph.graph.nodes:
        args: Any = node.args
        if node.target is ALL_TOKENS:
            ranks = args[3]
            size = _bytes(args[0], graph) * (ranks - 1)
            yield FetchedEntry("all tokens of a value", source_of(node), (size,) * ranks, (0,) * ranks)
        if node.target is FETCH_KEYS:
            _, reads, sizes, program, chunks, ranks, _ = args
            layout, shape = Layout.of(chunks, ranks), shape_at(node.meta["val"], graph.hints)
            total = shape[TOKENS]
            needed = needed_keys(program, (), sizes_of(graph, sizes), layout, total)
            each = _bytes(node, graph) // total
            owners = [int(needed[:, tokens].sum()) * each for tokens in layout.tokens(total)]
            yield FetchedEntry(
                "keys or values", source_of(node), tuple(int(n.sum()) * each for n in needed), tuple(owners),
                describe(parse(program)), bool(reads),
            )  # fmt: skip
