"""Which values of a graph for several ranks differ by rank: those that follow from a rank's own inputs, up to
where ranks come together."""

from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph, Rate
from attngraph.ir.ops.collectives import COLLECTIVES

OF_A_RANK = ("shard", "places")
"""Kinds of inputs of which every rank has its own."""


def differing(graph: ProgramGraph) -> set[fx.Node]:
    """The values that differ by rank. What a graph keeps from one call to the next is as what it takes up:
    pages differ where what is written to them does."""
    prompt = graph.stages.get(Rate.PROMPT)
    before: set[str] = set()
    if prompt is not None:
        own, results = differing(prompt), prompt.graph.output_node().args[0]
        before = {o.name for o, n in zip(prompt.outputs, results, strict=True) if n in own}  # type: ignore[arg-type]
    kept: set[str] = set()
    while True:
        found = _following(graph, before | kept)
        results = graph.graph.output_node().args[0]
        more = {
            o.name for o, n in zip(graph.outputs, results, strict=True)  # type: ignore[arg-type]
            if o.kind in ("pages", "carried") and n in found
        }  # fmt: skip
        if more <= kept:
            return found
        kept |= more


def _following(graph: ProgramGraph, names: set[str]) -> set[fx.Node]:
    """The values that follow from a rank's own inputs, or from the inputs of these names."""
    found = {
        n for n, i in zip(graph.placeholders(), graph.inputs, strict=True)
        if i.kind in OF_A_RANK or (i.kind not in ("parameter", "buffer", "constant", "argument")
                                   and i.name in names)
    }  # fmt: skip
    for node in graph.graph.nodes:
        if node.target not in COLLECTIVES and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
