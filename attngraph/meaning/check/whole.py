"""Whether a whole graph computes what an earlier form of it computes, for passes that ask for it."""

import torch
from torch import fx

from attngraph.errors import VerificationError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.meaning.check.check import same_value


def require_same_results(before: ProgramGraph, after: ProgramGraph) -> None:
    """Check that both graphs give the same results for random inputs, in float64, with gradients where they
    are recorded.

    Raises:
        VerificationError: they do not, or take other inputs, or have another number of results.
    """
    both = before.copy()
    given = {node.name: node for node in both.placeholders()}
    new = [node.name for node in after.placeholders() if node.name not in given]
    if new or len(before.results()) != len(after.results()):
        raise VerificationError(
            f"what cannot be compared with the graph before: {new or 'its number of results'}"
        )
    known: dict[fx.Node, fx.Node] = {node: given[node.name] for node in after.placeholders()}
    with both.graph.inserting_before(both.graph.output_node()):
        for node in after.graph.nodes:
            if node.op not in ("placeholder", "output"):
                known[node] = both.graph.node_copy(node, known.__getitem__)
                known[node].meta = dict(node.meta)
    for place, (old, found) in enumerate(zip(both.results(), after.results(), strict=True)):
        if isinstance(old, fx.Node) and isinstance(old.meta.get("val"), torch.Tensor):
            verdict = same_value(both, old, known[found], both.placeholders())
            if verdict.problem:
                raise VerificationError(
                    f"result {place} is not what it was before the pass: {verdict.problem}"
                )
