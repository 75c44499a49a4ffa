"""Fetches of keys that begin as soon as the keys are there, and are waited for as late as possible.

While keys travel between ranks, a rank computes what does not need them: its queries, and the keys and values
of the same layer that come later in the model's code. A graph's order is changed for that: among operations
that wait for the same number of fetches, those that a fetch needs come first. Operations that draw random
numbers keep their order, and all ranks have the same graph, so they exchange in the same order.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from attngraph.ir.graph.program_graph import is_random
from attngraph.ir.ops.token_collectives import FETCH_KEYS, begin_fetch, finish_fetch


def fetching_early(module: Callable[..., Any]) -> Callable[..., Any]:
    """The same computation, with fetches that other operations do not wait for, if it is a graph's module."""
    if not isinstance(module, fx.GraphModule) or not any(
        node.target is FETCH_KEYS for node in module.graph.nodes
    ):
        return module
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    begun: dict[fx.Node, fx.Node] = {}
    for node in _order(module.graph):
        if node.target is FETCH_KEYS and node not in begun:
            args = fx.map_arg(node.args, copies.__getitem__)
            begun[node] = graph.call_function(begin_fetch, args)
        elif node.target is FETCH_KEYS:
            own: Any = node.args[0]
            copies[node] = graph.call_function(finish_fetch, (copies[own], begun[node]))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _order(graph: fx.Graph) -> list[fx.Node]:
    """The nodes in the order in which they run; a fetch stands where it begins and again where it ends."""
    nodes = list(graph.nodes)
    before, last = dict[fx.Node, list[fx.Node]](), list[fx.Node]()
    for node in nodes:  # its operands, and before what draws random numbers, or does more, the last of these
        before[node] = list(node.all_input_nodes)
        if node.op == "call_function" and (is_random(node.target, node.args) or node.is_impure()):
            before[node] += last
            last = [node]
    waits: dict[fx.Node, int] = {}
    for node in nodes:
        waits[node] = max((waits[n] + (n.target is FETCH_KEYS) for n in before[node]), default=0)
    is_first = set()
    for node in reversed(nodes):
        if node.target is FETCH_KEYS or node in is_first:
            is_first |= {node, *(n for n in before[node] if waits[n] == waits[node])}
    place = {node: float(number) for number, node in enumerate(nodes)}
    steps: list[tuple[int, int, float, fx.Node]] = []
    for node in nodes:
        if node.op == "placeholder":
            steps.append((-1, 0, place[node], node))
        elif node.target is FETCH_KEYS:
            ready = max(place[n] for n in before[node]) + 0.5
            steps += [(waits[node], 0, ready, node), (waits[node] + 1, -1, place[node], node)]
        else:
            when = len(nodes) if node.op == "output" else waits[node]
            steps.append((when, int(node not in is_first), place[node], node))
    return [node for *_, node in sorted(steps, key=lambda step: step[:3])]
