"""What is computed from the last few tokens, as a formula of each token's own window.

A decoder's step runs a causal convolution on all rows' tokens in order, with the few before them
(`attngraph::with_earlier`), and picks the new tokens' results. An element of such a result reads the longer
sequence at the token's place and a few places before. `attngraph::last_tokens` gives each token these as
values of its own, so with them the result is computed from each token alone.
"""

from collections.abc import Callable, Iterable

import torch
from torch import fx

from attngraph.ir.graph import ProgramGraph, argument
from attngraph.ir.language import E, Expr
from attngraph.ir.ops.history import last_tokens, with_earlier
from attngraph.ir.walk import reached
from attngraph.meaning import M, Meaning
from attngraph.meaning.rule import UnliftableBecause
from attngraph.passes.build import Builder

MOST_TERMS = 16
"""A sum over at most so many places of a window is written out."""


class Windows:
    """The windows of a graph.

    Args:
        graph: gets an `attngraph::last_tokens` beside each `attngraph::with_earlier`; those that stay unused
            are removed with the graph's other dead nodes.
    """

    def __init__(self, graph: ProgramGraph) -> None:
        self._own: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.find_nodes(op="call_function", target=with_earlier):
            builder = Builder(graph, node.next)
            self._own[node] = builder.call(last_tokens, *node.args)
        self._after = _computed_from(self._own)
        places = _computed_from([argument(n, "place") for n in self._own])
        self._places = {n for n in places if getattr(n.meta.get("val"), "dtype", None) == torch.int64}

    def __bool__(self) -> bool:
        return bool(self._own)

    def rewritten(
        self, meaning: Meaning, value: Expr, token: Expr, is_longer: Callable[[fx.Node], bool]
    ) -> Expr:
        """A formula that reads what is computed from a longer sequence, in terms of the token's windows.

        Args:
            is_longer: whether a value has other dimensions than those of the step's tokens.

        Raises:
            Unliftable: it reads other places, or all of them.
        """

        def is_between(read: Expr) -> bool:
            return read.value in self._places or (read.value in self._after and is_longer(read.value))

        if not any(read.value in self._own or is_between(read) for read in E.reads(value)):
            return value
        value = meaning.lift(value, is_between)
        for node, own in self._own.items():
            if any(read.value is node for read in E.reads(value)):
                value = self._of_one(meaning, value, token, node, own)
        return value

    def _of_one(self, meaning: Meaning, value: Expr, token: Expr, node: fx.Node, own: fx.Node) -> Expr:
        back, dim, row_dim = (int(argument(node, name)) for name in ("back", "dim", "row_dim"))
        place = E.var("place", _with_extents(M.sub(meaning.shape(node)[dim], E.const(back))))
        at_token = E.read(argument(node, "place"), (token,), "int")

        def leaf(found: Expr, args: tuple[Expr, ...]) -> Expr:
            if found is at_token:
                return M.add(place, E.const(back))
            if found.op == "size":
                return _with_extents(found)
            extent = found.args[0].args[0] if found.op == "sum" else found
            if found.op == "sum" and extent.op == "const" and extent.value <= MOST_TERMS:
                variable, body = args
                if any(variable in r.args[dim].free for r in E.reads(body) if r.value is node):
                    # It counts the places of a window.
                    terms = [M.substitute(body, {variable: E.const(n)}) for n in range(int(extent.value))]
                    return E.make("add", tuple(terms), None, "float") if len(terms) > 1 else terms[0]
            return M.construct(found, args)

        def window(found: Expr, args: tuple[Expr, ...]) -> Expr:
            if found.op == "read" and found.value is node:
                steps = M.sub(args[dim], place)
                if steps.op != "const" or not 0 <= steps.value <= back or args[row_dim] is not E.ZERO:
                    raise UnliftableBecause("it reads places that are not in its window")
                inner = [a for d, a in enumerate(args) if d not in (row_dim, dim)]
                return E.read(own, (token, steps, *inner), "float")
            return M.construct(found, args)

        return E.rebuild(E.rebuild(value, leaf), window)


def _computed_from(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return set(reached((user for node in nodes for user in node.users), lambda node: node.users))


def _with_extents(value: Expr) -> Expr:
    """A size under a name for extents. All sizes here are extents of a step's inputs, so they are at least 1,
    which is not known of sizes that torch counts as data (`meaning/algebra/ranges.py`)."""
    sizes = {n for n in E.walk(value) if n.op == "size"}
    return M.substitute(value, {n: E.size(f"extent of {n.value}") for n in sizes})
