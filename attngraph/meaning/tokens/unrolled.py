"""A loop over tokens that was unrolled: what each of its nodes is of tokens and rows, and the text of a step.

`loops.py` finds the steps by these facts, and has one written as a part of a step program
(`ir/language/step_program.py`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from attngraph.ir.graph.program_graph import is_size
from attngraph.ir.kept import kept
from attngraph.ir.language import E, Expr
from attngraph.ir.language.step_program import written
from attngraph.ir.ops.nodes import view
from attngraph.ir.walk import filled
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.rule import is_part, tried
from attngraph.meaning.tokens.facts import Facts, Indices, Kind, own_variables
from attngraph.meaning.tokens.unfold import VIEWS


class NoLoop(Exception):
    """The value is not computed by equal steps; says why."""


@dataclasses.dataclass(frozen=True)
class Taken:
    """A node that holds what one token has in a value: `element` with the token's variable, at `token`."""

    token: int
    element: Expr


class Unrolled:
    """The nodes of one graph that was traced for a number of tokens."""

    def __init__(self, facts: Facts) -> None:
        self.meaning, self.space, self.facts = facts.meaning, facts.space, facts

    def followed(self, element: Expr) -> Expr:
        """What an element equals, through values that mix tokens and have them in a dimension."""
        while element.op == "read" and self.counts_tokens(element.value):
            if self.facts.known(element.value) is not None and str(element.value.target) not in VIEWS:
                break
            element = self.meaning.element(element.value, element.args)
        return element

    @kept
    def taken(self, node: fx.Node) -> Taken | None:
        """Which token's part of which value a node is; None if it is none."""
        row = self.row_dim(node)
        if row is None or self.counts_tokens(node):
            return None
        assert self.space.row is not None
        own = [E.ZERO if v.args[0] is E.ONE else v for v in own_variables(self.meaning.shape(node))]
        at = (*own[:row], self.space.row, *own[row + 1 :])
        element = tried(lambda: self.followed(self.meaning.element(node, at)))
        if element is None or element.op != "read":
            return None
        fact = self.facts.known(element.value)
        if fact is None or fact.kind is Kind.FIXED:
            return None
        place = self.space.place(fact.axes, self.space.token)
        if place is None or fact.axes[place] != (self.space.token,) or element.args[place].op != "const":
            return None
        token = int(element.args[place].value)
        args = (*element.args[:place], self.space.token, *element.args[place + 1 :])
        return Taken(token, E.read(element.value, args, element.kind))

    def counts_tokens(self, node: fx.Node) -> bool:
        """Whether a tensor has a dimension for the tokens."""
        values = pytree.tree_leaves(node.meta.get("val"))
        extents = (self.size(n) for t in values if isinstance(t, Tensor) for n in t.shape)
        return any(map(self.space.counts_tokens, extents))

    def row_dim(self, node: fx.Node) -> int | None:
        """The dimension of a tensor that counts the rows, if there is one."""
        value = node.meta.get("val")
        shape = value.shape if isinstance(value, Tensor) else ()
        found = [dim for dim, n in enumerate(shape) if self.size(n) is self.space.rows]
        return found[0] if len(found) == 1 else None

    def size(self, extent: Any) -> Expr:
        """A size as an expression, by the name that equal sizes share."""
        return self.meaning.renamed(size_expression(extent))

    def is_shared(self, node: fx.Node) -> bool:
        """Whether all tokens and all rows share a value."""
        fact = self.facts.get(node)
        return fact is not None and fact.is_shared


class StepWriter:
    """Writes one part of a step program.

    Args:
        nodes: of the loop. token: the one whose step it is. names: what the step before handed on, as the
            program calls it.
        other: the other part, which has the same tokens and shared values.
    """

    def __init__(
        self, nodes: Unrolled, token: int, names: Mapping[fx.Node, str], other: "StepWriter | None" = None
    ) -> None:
        self.nodes, self.token, self.given = nodes, token, names
        self.names: dict[fx.Node, str] = {}
        self.lines: list[str] = []
        self.tokens: list[tuple[Expr, Indices, torch.dtype]] = [] if other is None else other.tokens
        self.shared: list[fx.Node] = [] if other is None else other.shared

    def part(self, results: Sequence[fx.Node]) -> list[str]:
        """The lines; each result has the row in its first dimension. Raises `NoLoop`: something cannot be
        written."""
        found = [self._turned(self._name(n), n, to_rows=True) for n in results]
        return [*self.lines, f"    return {', '.join(found)}"]

    def _name(self, root: fx.Node) -> str:
        return filled(self.names, root, self._before, self._of)

    def _before(self, node: fx.Node) -> Sequence[fx.Node]:
        ends = node in self.given or is_size(node) or self.nodes.is_shared(node)
        return () if ends or self.nodes.taken(node) is not None else node.all_input_nodes

    def _of(self, node: fx.Node) -> str:
        if node in self.given:
            return self._turned(self.given[node], node)
        if is_size(node):
            return self._rows(self.nodes.size(node.meta["val"]))
        if self.nodes.is_shared(node):
            if node not in self.shared:
                self.shared.append(node)
            return f"s{self.shared.index(node)}"
        taken = self.nodes.taken(node)
        if taken is not None:
            return self._turned(self._token(node, taken), node)
        return self._operation(node)

    def _operation(self, node: fx.Node) -> str:
        if view(node) is not None or node.op != "call_function":
            raise NoLoop(f"a step contains %{node.name}")
        args = [self._written(a) for a in node.args]
        if is_part(node):
            return self._line(f"{args[0]}[{args[1]}]")
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NoLoop(f"a step contains %{node.name}")
        named = dict(node.kwargs)
        if "dtype" in (a.name for a in node.target._schema.arguments[len(node.args) :]):
            named["dtype"] = node.meta["val"].dtype  # it may be torch's default one
        args += [f"{name}={self._written(value)}" for name, value in named.items()]
        return self._line(f"{node.target}({', '.join(args)})")

    def _written(self, value: Any) -> str:
        try:
            return written(value, self.names)
        except ValueError as problem:
            raise NoLoop(f"a step has {problem}") from problem

    def _line(self, text: str) -> str:
        self.lines.append(f"    v{len(self.lines)} = {text}")
        return f"v{len(self.lines) - 1}"

    def _turned(self, name: str, node: fx.Node, to_rows: bool = False) -> str:
        """A value with the row in its first dimension as the node has it, or the other way round."""
        row = self.nodes.row_dim(node)
        if row is None:
            raise NoLoop(f"%{node.name} has no dimension for the rows")
        places = f"{row}, 0" if to_rows else f"0, {row}"
        return self._line(f"aten.movedim.int({name}, {places})") if row else name

    def _token(self, node: fx.Node, taken: Taken) -> str:
        if taken.token != self.token:
            raise NoLoop(f"the step of token {self.token} reads token {taken.token}")
        row, every = self.nodes.row_dim(node), own_variables(self.nodes.meaning.shape(node))
        own = tuple(variable for dim, variable in enumerate(every) if dim != row)
        given = taken.element, own, node.meta["val"].dtype
        if given not in self.tokens:
            self.tokens.append(given)
        return f"t{self.tokens.index(given)}"

    def _rows(self, size: Expr) -> str:
        """A size as a formula of the number of rows."""
        if size.op == "const":
            return str(size.value)
        if size is self.nodes.space.rows:
            return "rows"
        if size.op in ("add", "mul", "floordiv"):
            sign = {"add": " + ", "mul": " * ", "floordiv": " // "}[size.op]
            return f"({sign.join(self._rows(a) for a in size.args)})"
        raise NoLoop("a step has a size that does not follow from the number of rows")
