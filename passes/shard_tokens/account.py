"""What ranks that divide tokens fetch of each other, counted on the graph at the example's sizes."""

from collections.abc import Iterator, Sequence
from typing import Any

from attngraph.ir.graph import Axis, ProgramGraph, source_of
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.collectives import SUM_GRADIENTS
from attngraph.ir.ops.token_collectives import ALL_TOKENS, FETCH_KEYS, TOKENS, Layout, needed_keys
from attngraph.meaning.check.region import bytes_at, numbers_at, shape_at
from attngraph.meaning.masks.words import describe
from attngraph.report.ranks import ContextEntry, DividedTokens, FetchedEntry, WholeEntry


def account(
    graph: ProgramGraph, axis: Axis, axes: Sequence[DividedTokens], whole: Sequence[WholeEntry]
) -> ContextEntry:
    """The report's entry. `axes`: how the tokens are divided, for each size that counts some."""
    summing = (n for n in graph.graph.nodes if n.target is SUM_GRADIENTS and str(n.args[-1]) == axis.group)
    sums = [bytes_at(n.meta["val"], graph.hints) for n in summing]
    return ContextEntry(axis.count, tuple(axes), tuple(_fetched(graph)), tuple(whole), (len(sums), sum(sums)))


def _fetched(graph: ProgramGraph) -> Iterator[FetchedEntry]:
    for node in graph.graph.nodes:
        args: Any = node.args
        if node.target is ALL_TOKENS:
            ranks = args[3]
            size = bytes_at(args[0].meta["val"], graph.hints) * (ranks - 1)
            yield FetchedEntry("all tokens of a value", source_of(node), (size,) * ranks, (0,) * ranks)
        if node.target is FETCH_KEYS:
            _, reads, sizes, program, chunks, ranks, _ = args
            layout, shape = Layout.of(chunks, ranks), shape_at(node.meta["val"], graph.hints)
            total = shape[TOKENS]
            needed = needed_keys(program, (), numbers_at(sizes, graph.hints), layout, total)
            each = bytes_at(node.meta["val"], graph.hints) // total
            owners = [int(needed[:, tokens].sum()) * each for tokens in layout.tokens(total)]
            yield FetchedEntry(
                "keys or values", source_of(node), tuple(int(n.sum()) * each for n in needed), tuple(owners),
                describe(parse(program)), bool(reads),
            )  # fmt: skip
