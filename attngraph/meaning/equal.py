"""Equal computations: how a value is computed, with numbers in the place of nodes.

The steps of a value in one layer are equal to those of the value in a layer that is computed alike.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from attngraph.ir.graph import described, is_size

Step = tuple[Any, tuple[int, ...]]
"""How one node is computed, and its operands by number, in the order they were met."""


def steps_of(
    node: fx.Node, ends: Callable[[int, fx.Node], bool], tell: Callable[[fx.Node], Any]
) -> Iterator[tuple[fx.Node, Step]]:
    """The nodes from which a node is computed, by their numbers, each with its step. `ends`: whether to go no
    further from a node of some number. `tell`: what a step says of a node itself."""
    numbers, order = {node: 0}, [node]
    for place, each in enumerate(order):  # which grows
        below = [] if ends(place, each) else [n for n in each.all_input_nodes if not is_size(n)]
        order += [n for n in dict.fromkeys(below) if n not in numbers]
        numbers.update((n, number) for number, n in enumerate(order[len(numbers) :], len(numbers)))
        yield each, (tell(each), tuple(numbers[n] for n in below))


def told(node: fx.Node) -> tuple[Any, ...]:
    """A node's operation, its arguments that are no tensors, and the layout of its result."""
    given = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"] if is_size(n) else "%")
    called = (node.target, described(given)) if node.op == "call_function" else None
    return node.op, called, described(node.meta.get("val"))
