"""The nodes of a loop over tokens that was unrolled: what each of them is of the tokens and the rows.

Used by `loops.py`, which finds the steps, and by `write_step.py`. Nothing here edits the graph.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Unliftable
from attngraph.meaning.tokens.axes import Space
from attngraph.meaning.tokens.facts import Fact, Kind
from attngraph.meaning.tokens.unfold import VIEWS

_OF_TOKENS = (Kind.TOKEN, Kind.POSITION, Kind.ATTENTION, Kind.SCAN)


class NoLoop(Exception):
    """The value is not computed by equal steps; says why."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """A node that holds what one token has in a value: `element` with the token's variable, at `token`."""

    token: int
    element: Expr


class Unrolled:
    """The nodes of one graph that was traced for a number of tokens.

    Args:
        facts: what is known of the graph's values; may grow.
    """

    def __init__(self, meaning: Meaning, space: Space, facts: Mapping[fx.Node, Fact]) -> None:
        self.meaning, self.space, self.facts = meaning, space, facts
        self._taken: dict[fx.Node, Taken | None] = {}

    def followed(self, element: Expr) -> Expr:
        """What an element equals, through values that mix tokens and have them in a dimension."""
        while element.op == "read" and self.counts_tokens(element.value):
            fact = self.facts.get(element.value)
            if fact is not None and fact.kind is not Kind.MIXING and str(element.value.target) not in VIEWS:
                break
            element = self.meaning.element(element.value, element.args)
        return element

    def taken(self, node: fx.Node) -> Taken | None:
        """Which token's part of which value a node is; None if it is none."""
        if node not in self._taken:
            self._taken[node] = self._find_taken(node)
        return self._taken[node]

    def _find_taken(self, node: fx.Node) -> Taken | None:
        row = self.row_dim(node)
        if row is None or self.counts_tokens(node):
            return None
        assert self.space.row is not None
        shape = self.meaning.shape(node)
        own = [E.ZERO if n is E.ONE else E.var(f"own{dim}", n) for dim, n in enumerate(shape)]
        at = (*own[:row], self.space.row, *own[row + 1 :])
        try:
            element = self.followed(self.meaning.element(node, at))
        except Unliftable:
            return None
        fact = self.facts.get(element.value) if element.op == "read" else None
        if fact is None or fact.kind not in _OF_TOKENS:
            return None
        place = self.space.place(fact.axes, self.space.token)
        if place is None or fact.axes[place] != (self.space.token,) or element.args[place].op != "const":
            return None
        token = int(element.args[place].value)
        args = (*element.args[:place], self.space.token, *element.args[place + 1 :])
        return Taken(token, E.read(element.value, args, element.kind))

    def counts_tokens(self, node: fx.Node) -> bool:
        """Whether a tensor has a dimension for the tokens."""
        value = node.meta.get("val")
        tensors = [value] if isinstance(value, Tensor) else value if isinstance(value, (tuple, list)) else ()
        extents = (n for t in tensors if isinstance(t, Tensor) for n in t.shape)
        return any(self.space.tokens in E.walk(self.size(n)) for n in extents)

    def row_dim(self, node: fx.Node) -> int | None:
        """The dimension of a tensor that counts the rows, if there is one."""
        value = node.meta.get("val")
        shape = value.shape if isinstance(value, Tensor) else ()
        found = [dim for dim, n in enumerate(shape) if (self.size(n) is self.space.rows)]
        return found[0] if len(found) == 1 else None

    def size(self, extent: Any) -> Expr:
        """A size as an expression, by the name that equal sizes share."""
        return self.meaning.renamed(size_expression(extent))

    def is_shared(self, node: fx.Node) -> bool:
        """Whether all tokens and all rows share a value."""
        fact = self.facts.get(node)
        return fact is not None and fact.kind is Kind.FIXED and not any(fact.axes)
