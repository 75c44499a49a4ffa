"""What a graph for several ranks sends and holds, counted on the graph, for the report."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from attngraph.ir.graph import ProgramGraph, Ranks, computed_from, op_name, source_of
from attngraph.ir.ops import nodes
from attngraph.ir.ops.collectives import ALL_GATHER, ALL_REDUCE, bytes_sent
from attngraph.meaning.placement.table import differing
from attngraph.report.ranks import CacheRanksEntry, DividedEntry, RanksEntry, SentEntry


def account(
    graph: ProgramGraph, ranks: Ranks, count: int, divided: tuple[DividedEntry, ...],
    sizes: Mapping[str, int], reasons: Mapping[str, str],
) -> RanksEntry:  # fmt: skip
    """The report's entry.

    Args:
        count: how many ranks divide heads and units.
        sizes: the number of elements of every parameter that the model uses, by name; negative for vectors.
        reasons: why a parameter is not divided.
    """
    sent = []
    for node in (n for n in graph.graph.nodes if n.target in (ALL_REDUCE, ALL_GATHER)):
        value = node.all_input_nodes[0].meta["val"]  # for one token: the sizes that do not vary
        fixed = [n for n in value.shape if isinstance(n, int)]
        size = math.prod(fixed) * value.dtype.itemsize
        what, to_all = op_name(node).replace("_", "-"), bytes_sent(node.target, size, count)
        sent.append(SentEntry(what, source_of(node), size, to_all, len(fixed) == len(value.shape)))
    shards = {ranks.shards[i.name].parameter for i in graph.inputs if i.kind == "shard"}
    whole = [(n, s) for n, s in sizes.items() if n not in shards]
    other = "nothing of it is divided among ranks"
    return RanksEntry(
        count, divided, tuple(sent),
        tuple((n.removeprefix("model."), s, reasons.get(n, other)) for n, s in whole if s > 0),
        sum(s < 0 for _, s in whole),
        (sum(map(abs, sizes.values())),
         sum(abs(s) // (count if n in shards else 1) for n, s in sizes.items())),
    )  # fmt: skip


def account_cache(graph: ProgramGraph, dtype: torch.dtype | None) -> CacheRanksEntry:
    """What each rank keeps of what a decoder keeps; `dtype`: of cached values, None: as computed."""
    assert graph.ranks is not None and graph.state is not None
    own, heads, stays = differing(graph), [], graph.ranks.undivided
    latents, shared, ranks = set[str](), set[str](), graph.ranks.count
    names = {node: name for name, node in graph.pages().items()}

    def kept_in(pages: Iterable[fx.Node]) -> list[str]:
        return [names[n] for n in computed_from(pages) if n in names]

    for node in graph.graph.nodes:
        match nodes.view(node):
            case nodes.DividedAttention():
                pass  # counted by tokens
            case nodes.CachedAttention(k_pages=pages) if pages in own:
                kept, of = int(pages.meta["val"].shape[1]), node.meta["attention"].kv_heads
                reasons = [stays[name] for name in kept_in([pages]) if name in stays]
                heads.append((kept, of, reasons[0] if reasons and kept * ranks > of else ""))
            case nodes.CachedLatentAttention(pages=pages):
                latents.update(kept_in([pages]))
            case nodes.CachedAttention(q=q, k_pages=k, v_pages=v) if q in own:
                shared.update(kept_in([k, v]))
    differs = {told.name: n in own for n, told in zip(graph.results(), graph.outputs, strict=True)}
    alike = [
        (s.label, s.bytes_in(dtype), "token",
         ("all heads share it" if s.name in latents
         else "the heads of every rank attend to it" if s.name in shared
         else "what it is kept for is not divided") + (f"; {stays[s.name]}" if s.name in stays else ""))
        for s in graph.state.stores if not differs[s.name] and s.team == 1
    ]  # fmt: skip
    alike += [
        (c.label, c.bytes_per_row, "sequence", "what it is carried for is not divided")
        for c in graph.state.carried if not differs[c.name]
    ]  # fmt: skip
    tokens = ((s.label, s.bytes_in(dtype), s.team) for s in graph.state.stores if s.team > 1)
    return CacheRanksEntry(graph.ranks.count, tuple(heads), tuple(alike), tuple(tokens))
