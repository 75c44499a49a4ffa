"""Whether a pass has changed a graph, by looking at which objects it consists of.

Printing and verifying a graph look at every part of it. A pass that found nothing leaves all parts the very
objects that they were, and then both say what they said before.
"""

import operator
from collections.abc import Iterator
from typing import Any

from attngraph.ir.graph.program_graph import ProgramGraph


def seen(graph: ProgramGraph) -> list[Any]:
    """All objects that the graph's text and its promises follow from."""
    return list(_parts(graph))


def is_unchanged(before: list[Any], graph: ProgramGraph) -> bool:
    """Whether it still consists of the same objects."""
    now = seen(graph)
    return len(now) == len(before) and all(map(operator.is_, before, now))


def _parts(graph: ProgramGraph) -> Iterator[Any]:
    yield graph.level
    yield from (graph.inputs, graph.outputs, graph.conditions, graph.gradients, graph.state, graph.ranks)
    for table in (graph.constants, graph.values, graph.hints):
        yield from table
        yield from table.values()
    yield from sorted(graph.assumed)
    for node in graph.graph.nodes:
        yield from (node, node.target, node.args, node.kwargs)
        yield from node.meta.values()
    for rate, stage in graph.stages.items():
        yield rate
        yield from _parts(stage)
