"""Softmaxes over what the data select: routers of experts, samplers, matchings, edges of a graph.

Only the largest few of their weights are used, or an index says which exponentials are added up. They do not
weight keys, so they are not attention, and the report says just that. Where they choose from products of two
values that the model computes, it may be attention to chosen keys, and the report does not deny it.
Used only for softmaxes that were not fused; never decides what is fused.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

from attngraph.ir import budgets
from attngraph.ir.graph.source import source_of
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, is_part

_CHOICES = frozenset({"topk", "sort", "argmax", "argsort", "kthvalue", "max"})
_EXTREMES = _CHOICES | {"amax", "amin", "min"}
"""Operations of whose operands only the largest or smallest few matter."""
_ADDING = frozenset({"index_add", "scatter_add", "scatter_reduce", "index_reduce", "index_put"})


@dataclasses.dataclass(frozen=True)
class Choice:
    """That of a softmax's scores or weights only the largest few are used.

    Attributes:
        what: "weights" or "scores". at: the user's line. among: the value that the choice is made from.
    """

    what: str
    at: str
    among: fx.Node

    def reason(self, is_routing: bool) -> str:
        """Why it is left as it is. `is_routing`: what is chosen are no keys that the model computes."""
        found = f"only the largest few of its {self.what} are used ({self.at}), as a router of experts does: "
        if is_routing:
            return found + "this is no attention and is left as it is"
        return found + "data choose what is weighed, so it is left as it is"


def find_choice(meaning: Meaning, softmax: fx.Node) -> Choice | None:
    """The choice that is made after a softmax or before it; None where all of its weights are used."""

    def chooses(node: fx.Node) -> bool:
        return _is_one_of(_CHOICES, node)

    def is_choice_part(node: fx.Node) -> bool:  # the values that a selecting op returns, not the indices
        return is_part(node) and bool(node.args[1] == 0) and chooses(node.all_input_nodes[0])

    def next_sources(node: fx.Node) -> Iterable[fx.Node]:
        return node.all_input_nodes[:1] if _passes(meaning, node) else ()

    def uses_all(node: fx.Node) -> bool:
        return any(not _passes(meaning, user) and not _is_one_of(_EXTREMES, user) for user in node.users)

    next_users = functools.partial(_next_users, meaning)
    after = _nearest([softmax], next_users, lambda n: any(map(chooses, n.users)))
    if after is not None and _nearest([softmax], next_users, uses_all) is None:
        use = next(filter(chooses, after.users))
        return Choice("weights", source_of(use), softmax.all_input_nodes[0])
    before = _nearest(softmax.all_input_nodes[:1], next_sources, is_choice_part)
    if before is not None:
        return Choice("scores", source_of(before), before.all_input_nodes[0].all_input_nodes[0])
    return None


def describe_edges(meaning: Meaning, exponential: fx.Node) -> str | None:
    """The reason for exponentials that an index adds up for each node of a graph, and that are divided by
    those sums; None for others."""
    next_users = functools.partial(_next_users, meaning)
    summed = _nearest([exponential], next_users, lambda n: any(_is_one_of(_ADDING, u) for u in n.users))
    for total in [] if summed is None else [u for u in summed.users if _is_one_of(_ADDING, u)]:
        if _nearest([total], next_users, lambda n: str(n.target).startswith("aten.div.")) is not None:
            return (
                f"its exponentials are added up where an index says ({source_of(total)}), as in a softmax "
                "over the edges of a graph: data choose what each node weighs, so it is left as it is"
            )
    return None


def _is_one_of(names: frozenset[str], node: fx.Node) -> bool:
    name = str(node.target).split(".")
    return node.op == "call_function" and name[0] == "aten" and name[1] in names


def _passes(meaning: Meaning, node: fx.Node) -> bool:
    return node.op == "call_function" and meaning.category(node) in (Category.MOVEMENT, Category.POINTWISE)


def _next_users(meaning: Meaning, node: fx.Node) -> Iterable[fx.Node]:
    return [user for user in node.users if _passes(meaning, user)]


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


def is_of_one_key(node: fx.Node) -> bool:
    """Whether a softmax, or that of torch's attention, runs over a dimension of one element."""
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        keys = node.args[1]
        return isinstance(keys, fx.Node) and guard_or_false(keys.meta["val"].shape[-2] == 1)
    dim = node.args[1] if len(node.args) > 1 else None
    return isinstance(dim, int) and guard_or_false(node.meta["val"].shape[dim] == 1)
