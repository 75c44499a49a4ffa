"""What a graph for several ranks sends and holds, counted on the graph, for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph, op_name
from attngraph.ir.graph.source import source_of
from attngraph.ir.ops.collectives import ALL_GATHER, ALL_REDUCE, bytes_sent
from attngraph.report.ranks import DividedEntry, RanksEntry, SentEntry


def account(
    graph: ProgramGraph, divided: tuple[DividedEntry, ...], sizes: Mapping[str, int],
    reasons: Mapping[str, str],
) -> RanksEntry:  # fmt: skip
    """The report's entry.

    Args:
        sizes: the number of elements of every parameter that the model uses, by name; negative for vectors.
        reasons: why a parameter is not divided.
    """
    assert graph.ranks is not None
    ranks = graph.ranks.count
    sent = tuple(_sent(n, ranks) for n in graph.graph.nodes if n.target in (ALL_REDUCE, ALL_GATHER))
    shards = {graph.ranks.shards[i.name].parameter for i in graph.inputs if i.kind == "shard"}
    whole = [(n, s) for n, s in sizes.items() if n not in shards]
    other = "nothing of it is divided among ranks"
    return RanksEntry(
        ranks, divided, sent,
        tuple((n.removeprefix("model."), s, reasons.get(n, other)) for n, s in whole if s > 0),
        sum(s < 0 for _, s in whole),
        (sum(map(abs, sizes.values())),
         sum(abs(s) // (ranks if n in shards else 1) for n, s in sizes.items())),
    )  # fmt: skip


def _sent(node: fx.Node, ranks: int) -> SentEntry:
    """The bytes of a collective's operand for one token: its sizes that do not vary."""
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    size = math.prod(n for n in value.shape if isinstance(n, int)) * value.dtype.itemsize
    fixed = all(isinstance(n, int) for n in value.shape)
    what = op_name(node).replace("_", "-")
    return SentEntry(what, source_of(node), size, bytes_sent(node.target, size, ranks), fixed)
