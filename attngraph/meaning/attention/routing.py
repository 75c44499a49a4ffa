"""Softmaxes over what the data select: routers of experts, samplers, matchings, edges of a graph.

Only the largest few of their weights are used, or an index says which exponentials are added up. They do not
weight keys, so they are not attention, and the report says just that.
Used only for softmaxes that were not fused; never decides what is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph.source import source_of
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, is_part

_CHOICES = frozenset({"topk", "sort", "argmax", "argsort", "kthvalue", "max"})

_ADDING = frozenset({"index_add", "scatter_add", "scatter_reduce", "index_reduce", "index_put"})


def describe_routing(meaning: Meaning, softmax: fx.Node) -> str | None:
    """The reason for a softmax of which only the largest scores or weights are used; None for others."""

    def next_users(node: fx.Node) -> Iterable[fx.Node]:
        return [user for user in node.users if _passes(meaning, user)]

    def next_sources(node: fx.Node) -> Iterable[fx.Node]:
        return node.all_input_nodes[:1] if _passes(meaning, node) else ()

    after = _nearest([softmax], next_users, lambda n: any(map(_chooses, n.users)))
    if after is not None:
        place = source_of(next(u for u in after.users if _chooses(u)))
        return (
            f"only the largest few of its weights are used ({place}), as a router of experts does: this is "
            "no attention and is left as it is"
        )
    before = _nearest(softmax.all_input_nodes[:1], next_sources, _is_choice_part)
    if before is not None:
        return (
            f"its scores are the largest few of a longer list ({source_of(before)}), as in a router of "
            "experts: data choose what they weigh, so this is no attention over keys and is left as it is"
        )
    return None


def describe_edges(meaning: Meaning, exponential: fx.Node) -> str | None:
    """The reason for exponentials that an index adds up for each node of a graph, and that are divided by
    those sums; None for others."""

    def next_users(node: fx.Node) -> Iterable[fx.Node]:
        return [user for user in node.users if _passes(meaning, user)]

    def adds(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if _adds_by_index(user)]

    summed = _nearest([exponential], next_users, lambda n: bool(adds(n)))
    for total in [] if summed is None else adds(summed):
        if _nearest([total], next_users, lambda n: str(n.target).startswith("aten.div.")) is not None:
            return (
                f"its exponentials are added up where an index says ({source_of(total)}), as in a softmax "
                "over the edges of a graph: data choose what each node weighs, so it is left as it is"
            )
    return None


def _adds_by_index(node: fx.Node) -> bool:
    name = str(node.target).split(".")
    return node.op == "call_function" and name[0] == "aten" and name[1] in _ADDING


def _passes(meaning: Meaning, node: fx.Node) -> bool:
    return node.op == "call_function" and meaning.category(node) in (Category.MOVEMENT, Category.POINTWISE)


def _chooses(node: fx.Node) -> bool:
    name = str(node.target).split(".")
    return node.op == "call_function" and name[0] == "aten" and name[1] in _CHOICES


def _is_choice_part(node: fx.Node) -> bool:
    """Whether a node is the values that a selecting op such as top-k returns, not the indices."""
    return is_part(node) and bool(node.args[1] == 0) and _chooses(node.all_input_nodes[0])


def _nearest(
    starts: Iterable[fx.Node],
    further: Callable[[fx.Node], Iterable[fx.Node]],
    found: Callable[[fx.Node], bool],
) -> fx.Node | None:
    """The nearest node that `found` accepts, breadth first from the starts."""
    front, seen = list(starts), set(starts)
    for _ in range(budgets.ROUTING_OPS):
        for node in front:
            if found(node):
                return node
        front = [n for node in front for n in further(node) if n not in seen]
        seen.update(front)
    return None
