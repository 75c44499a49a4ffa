"""Loops over tokens: what one step hands to the next, found in the graph of a loop that was unrolled.

A loop over tokens is traced as equal operations, once for each token. Each operation belongs to the latest
token that it is computed from. What the steps up to a token hand to later ones is a minimum cut between the
operations of both (`networkx.minimum_cut`, bytes of a row as capacities), and the operations from one cut to
the next are one step:

    handed', out = step(handed, token)

One step is taken as the pattern. All others must be the same operations of the same operands, with their
own token in the place of its; only the first may differ, as it has nothing before it. Nothing is assumed
about what a step computes, so this is how running maxima, gates and cells are carried. (Sums over earlier
tokens are found before, by `recurrence.py`: they need no steps.) Nothing here edits the graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import is_size, operands_first
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.step_program import written
from attngraph.ir.ops import nodes
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.sizes import size_expression
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Unliftable
from attngraph.meaning.tokens.axes import Axes, Indices, Space
from attngraph.meaning.tokens.facts import Fact, Handed, Kind, TokenLoop
from attngraph.meaning.tokens.unfold import VIEWS

PATTERN = 3
"""The token whose step is the pattern: the first ones may be computed in another way."""
_AGED = 1 << 10
"""A value counts for so many of the next token's: few small values of every token so far are no state."""
_OF_TOKENS = (Kind.TOKEN, Kind.POSITION, Kind.ATTENTION, Kind.SCAN)


class NoLoop(Exception):
    """The value is not computed by equal steps; says why."""


@dataclasses.dataclass(frozen=True)
class _Taken:
    """A node that holds what one token has in a value: `element` with the token's variable, at `token`."""

    token: int
    element: Expr


class LoopFinder:
    """Looks for loops over tokens in one graph that was traced for a number of tokens.

    Args:
        facts: what is known of the values before the one that is looked at; read when `find` is called.
    """

    def __init__(self, meaning: Meaning, space: Space, facts: Mapping[fx.Node, Fact], tokens: int) -> None:
        self.meaning, self.space, self.facts, self.tokens = meaning, space, facts, tokens
        self.why_not: dict[fx.Node, str] = {}
        self._taken: dict[fx.Node, _Taken | None] = {}

    def find(self, node: fx.Node, axes: Axes) -> TokenLoop | None:
        """How a value with these axes is computed by steps, or None."""
        unrolled = self.space.tokens.op == "const" and self.tokens > PATTERN + 2
        if not unrolled or self.space.row is None or any(len(digits) > 1 for digits in axes):
            return None
        try:
            results = self._results(node, axes)
            return None if results is None else _Steps(self, *results).loop()
        except (NoLoop, Unliftable) as why_not:
            self.why_not[node] = str(why_not)
            return None

    def _results(self, node: fx.Node, axes: Axes) -> tuple[list[fx.Node], Indices, Indices] | None:
        """The node that computes each token's part of a value, and which element of it the value has where;
        None where a token's part is not computed, as in one that a loop has not yet filled."""
        shape = self.meaning.shape(node)
        own = tuple(E.var(f"own{dim}", extent) for dim, extent in enumerate(shape))
        found: list[tuple[fx.Node, Indices]] = []
        for token in reversed(range(self.tokens)):
            at = tuple(
                E.const(token) if self.space.token in digits else digits[0] if digits else own[dim]
                for dim, digits in enumerate(axes)
            )
            element = self._followed(self.meaning.element(node, at))
            if element.op != "read" or self.counts_tokens(element.value):
                return None
            found.append((element.value, element.args))
        results, places = zip(*reversed(found), strict=True)
        row = self.row_dim(results[-1])
        if len(set(places)) > 1 or row is None or places[0][row] is not self.space.row:
            return None
        variables = tuple(v for v, digits in zip(own, axes, strict=True) if not digits)
        return list(results), tuple(p for dim, p in enumerate(places[0]) if dim != row), variables

    def _followed(self, element: Expr) -> Expr:
        """What an element equals, through values that mix tokens and have them in a dimension."""
        while element.op == "read" and self.counts_tokens(element.value):
            fact = self.facts.get(element.value)
            if fact is not None and fact.kind is not Kind.MIXING and str(element.value.target) not in VIEWS:
                break
            element = self.meaning.element(element.value, element.args)
        return element

    def taken(self, node: fx.Node) -> _Taken | None:
        """Which token's part of which value a node is; None if it is none."""
        if node not in self._taken:
            self._taken[node] = self._find_taken(node)
        return self._taken[node]

    def _find_taken(self, node: fx.Node) -> _Taken | None:
        row = self.row_dim(node)
        if row is None or self.counts_tokens(node):
            return None
        assert self.space.row is not None
        shape = self.meaning.shape(node)
        own = [E.ZERO if n is E.ONE else E.var(f"own{dim}", n) for dim, n in enumerate(shape)]
        at = (*own[:row], self.space.row, *own[row + 1 :])
        try:
            element = self._followed(self.meaning.element(node, at))
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
        return _Taken(token, E.read(element.value, args, element.kind))

    def counts_tokens(self, node: fx.Node) -> bool:
        """Whether a tensor has a dimension for the tokens."""
        value = node.meta.get("val")
        tensors = [value] if isinstance(value, Tensor) else value if isinstance(value, (tuple, list)) else ()
        extents = (n for t in tensors if isinstance(t, Tensor) for n in t.shape)
        return any(self.space.tokens in E.walk(self._size(n)) for n in extents)

    def row_dim(self, node: fx.Node) -> int | None:
        """The dimension of a tensor that counts the rows, if there is one."""
        value = node.meta.get("val")
        found = [dim for dim, n in enumerate(value.shape) if self._is_rows(n)] if isinstance(value, Tensor) else []  # fmt: skip
        return found[0] if len(found) == 1 else None

    def _is_rows(self, extent: Any) -> bool:
        return self._size(extent) is self.space.rows

    def _size(self, extent: Any) -> Expr:
        return self.meaning.renamed(size_expression(extent))


class _Steps:
    """The steps that compute `results`, one node for each token.

    `place` and `variables`: as `result` and `variables` of `TokenLoop`.
    """

    def __init__(
        self, finder: LoopFinder, results: list[fx.Node], place: Indices, variables: Indices
    ) -> None:
        self.finder, self.results, self.place, self.variables = finder, results, place, variables
        self.order = operands_first([n for n in results if not self._is_shared(n)], self._operands)
        self.levels: dict[fx.Node, int] = {}
        for node in self.order:
            taken = finder.taken(node)
            if taken is None and finder.counts_tokens(node):
                raise NoLoop(f"a step reads %{node.name}, which has all tokens")
            below = max((self.levels.get(n, -1) for n in self._operands(node)), default=-1)
            self.levels[node] = below if taken is None else taken.token

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether all tokens and all rows share a value."""
        fact = self.finder.facts.get(node)
        return fact is not None and fact.kind is Kind.FIXED and not any(fact.axes)

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        if self.finder.taken(node) is not None:
            return []
        return [n for n in node.all_input_nodes if not is_size(n) and not self._is_shared(n)]

    def loop(self) -> TokenLoop:
        """Raises NoLoop where the steps are not equal."""
        cut = self._cut(PATTERN - 1)
        if not cut:
            raise NoLoop("no step hands anything to the next")
        handed = self._handed(cut)
        text = _Writer(self, PATTERN, {n: f"c{number}" for number, n in enumerate(cut)})
        step = text.part([self.results[PATTERN], *handed])
        first = _Writer(self, 0, {}, text)
        begin = first.part([self.results[0], *self.first])
        program = "\n".join(["begin:", *begin, "step:", *step])
        about = tuple(self._about(n) for n in handed)
        return TokenLoop(program, tuple(text.tokens), tuple(text.shared), about, self.place, self.variables)

    # --- what is handed on ---

    def _cut(self, token: int) -> list[fx.Node]:
        """What the steps up to a token hand to later ones: of the cuts with the fewest bytes (of older tokens
        before all), the one nearest to where it is used."""
        flow = nx.DiGraph()
        later = [n for n in self.results[token + 1 :] if self.levels.get(n, -1) <= token]
        for node in self.order:
            operands = [n for n in self._operands(node) if 0 <= self.levels[n] <= token]
            if self.levels[node] > token:
                later += operands
            elif self.levels[node] >= 0:
                size, age = self._bytes(node), token - self.levels[node]
                limit = {} if size is None else {"capacity": size * _AGED**age}
                flow.add_edge(("in", node), ("out", node), **limit)
                for before in [("out", n) for n in operands] or ["tokens"]:
                    flow.add_edge(before, ("in", node))
        flow.add_edges_from((("out", n), "later") for n in later if self.levels.get(n, -1) >= 0)
        if "later" not in flow:
            return []
        try:  # the cut nearest to the target
            _, (reached, _) = nx.minimum_cut(flow, "tokens", "later")
        except nx.NetworkXUnbounded:
            raise NoLoop("what a step hands on is no tensor with a dimension for the rows") from None
        return [n for n in self.order if ("in", n) in reached and ("out", n) not in reached]

    def _bytes(self, node: fx.Node) -> int | None:
        value, row = node.meta.get("val"), self.finder.row_dim(node)
        if row is None:
            return None
        own = [n for dim, n in enumerate(value.shape) if dim != row]
        if not all(isinstance(n, int) for n in own):
            return None
        return math.prod(own) * value.dtype.itemsize or 1

    def _about(self, node: fx.Node) -> Handed:
        value, row = node.meta["val"], self.finder.row_dim(node)
        return Handed(tuple(int(n) for dim, n in enumerate(value.shape) if dim != row), value.dtype)

    def _handed(self, cut: Sequence[fx.Node]) -> list[fx.Node]:
        """What the pattern's step hands on: a node for each of the cut before it. All steps are compared with
        the pattern; `self.first` is what the first one hands on."""
        last = self.tokens - 1
        at: list[dict[int, fx.Node]] = [{} for _ in range(self.tokens)]
        """For each token, what its step hands on."""
        at[PATTERN - 1] = dict(enumerate(cut))
        for token in range(PATTERN, last + 1):
            self._compare(PATTERN, self.results[PATTERN], token, self.results[token], cut, at)
        waiting, done = set(at[PATTERN]), set[int]()
        while waiting:
            number = waiting.pop()
            done.add(number)
            for token in range(PATTERN, last):
                if number in at[token]:
                    self._compare(PATTERN, at[PATTERN][number], token, at[token][number], cut, at)
            waiting |= set(at[PATTERN]) - done
        if len(done) < len(cut):
            raise NoLoop("what a step hands on is not used in the same way by later ones")
        handed = [at[PATTERN][number] for number in range(len(cut))]
        for token in reversed(range(1, PATTERN)):
            self._compare(PATTERN, self.results[PATTERN], token, self.results[token], cut, at)
            for number, node in enumerate(handed):
                if number not in at[token]:
                    raise NoLoop("what a step hands on is not used in the same way by later ones")
                self._compare(PATTERN, node, token, at[token][number], cut, at)
        if len(at[0]) < len(cut):
            raise NoLoop("the first step does not hand on what later ones do")
        self.first = [at[0][number] for number in range(len(cut))]
        return handed

    @property
    def tokens(self) -> int:
        return self.finder.tokens

    # --- equal steps ---

    def _compare(
        self, at: int, pattern: Any, token: int, other: Any, cut: Sequence[fx.Node],
        found: list[dict[int, fx.Node]],
    ) -> None:  # fmt: skip
        """Note what the step of `token` takes from the one before it, where the pattern takes the cut.

        Raises:
            NoLoop: they are not the same operations.
        """
        numbers = {node: number for number, node in enumerate(cut)}
        seen: set[tuple[fx.Node, fx.Node]] = set()
        stack = [(pattern, other)]
        while stack:
            one, two = stack.pop()
            if not isinstance(one, fx.Node) or not isinstance(two, fx.Node):
                stack += self._parts(one, two, token)
            elif (one, two) not in seen:
                seen.add((one, two))
                if one in numbers:
                    if found[token - 1].setdefault(numbers[one], two) is not two:
                        raise NoLoop(f"the steps of tokens {at} and {token} take other values")
                elif not self._is_same(one, two, at, token):
                    stack += self._parts((one.target, one.args, one.kwargs), (two.target, two.args, two.kwargs), token)  # fmt: skip

    def _parts(self, one: Any, two: Any, token: int) -> Iterator[tuple[Any, Any]]:
        if isinstance(one, (tuple, list)) and isinstance(two, (tuple, list)) and len(one) == len(two):
            yield from zip(one, two, strict=True)
        elif isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
            yield from ((one[key], two[key]) for key in one)
        elif type(one) is not type(two) or not (one == two or (one != one and two != two)):
            raise NoLoop(f"the step of token {token} does not compute what the others do")

    def _is_same(self, one: fx.Node, two: fx.Node, at: int, token: int) -> bool:
        """Whether two nodes are known to be the same, or the same of each one's token; if not, they are if
        their operations and operands are."""
        if one is two or (is_size(one) and is_size(two) and self._size(one) is self._size(two)):
            return True
        computed = one.op == two.op == "call_function" and not (is_size(one) or is_size(two))
        if not computed or self._is_shared(one) != self._is_shared(two):
            raise NoLoop(f"the step of token {token} does not compute what the others do")
        if self._is_shared(one):
            return False
        taken, other = self.finder.taken(one), self.finder.taken(two)
        if (taken is None) != (other is None):
            raise NoLoop(f"the step of token {token} does not compute what the others do")
        if taken is None or other is None:
            return False
        if taken.element is not other.element or taken.token - at != other.token - token:
            raise NoLoop(f"the step of token {token} does not read its token as the others do")
        return True

    def _size(self, node: fx.Node) -> Expr:
        return self.finder.meaning.renamed(size_expression(node.meta["val"]))


class _Writer:
    """Writes one part of a step program.

    Args:
        token: the one whose step it is. names: what the step before handed on, as the program calls it.
        other: the other part, which has the same tokens and shared values.
    """

    def __init__(
        self, steps: _Steps, token: int, names: Mapping[fx.Node, str], other: _Writer | None = None
    ) -> None:
        self.steps, self.token, self.given = steps, token, names
        self.names: dict[fx.Node, str] = {}
        self.lines: list[str] = []
        self.tokens: list[tuple[Expr, Indices, torch.dtype]] = [] if other is None else other.tokens
        self.shared: list[fx.Node] = [] if other is None else other.shared

    def part(self, results: Sequence[fx.Node]) -> list[str]:
        """The lines; each result has the row in its first dimension.

        Raises:
            NoLoop: something cannot be written.
        """
        found = [self._turned(self._name(n), n, to_rows=True) for n in results]
        return [*self.lines, f"    return {', '.join(found)}"]

    def _name(self, root: fx.Node) -> str:
        order = operands_first([root], lambda n: () if n in self.names else self._before(n))
        for node in order:
            if node not in self.names:
                self.names[node] = self._of(node)
        return self.names[root]

    def _before(self, node: fx.Node) -> Sequence[fx.Node]:
        ends = node in self.given or is_size(node) or self.steps._is_shared(node)
        return () if ends or self.steps.finder.taken(node) is not None else node.all_input_nodes

    def _of(self, node: fx.Node) -> str:
        if node in self.given:
            return self._turned(self.given[node], node)
        if is_size(node):
            return self._rows(self.steps._size(node))
        if self.steps._is_shared(node):
            if node not in self.shared:
                self.shared.append(node)
            return f"s{self.shared.index(node)}"
        taken = self.steps.finder.taken(node)
        if taken is not None:
            return self._turned(self._token(node, taken), node)
        return self._operation(node)

    def _operation(self, node: fx.Node) -> str:
        if nodes.view(node) is not None or node.op != "call_function":
            raise NoLoop(f"a step contains %{node.name}")
        args = [self._written(a) for a in node.args]
        if getattr(node.target, "__name__", "") == "getitem":
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
        row = self.steps.finder.row_dim(node)
        if row is None:
            raise NoLoop(f"%{node.name} has no dimension for the rows")
        places = f"{row}, 0" if to_rows else f"0, {row}"
        return self._line(f"aten.movedim.int({name}, {places})") if row else name

    def _token(self, node: fx.Node, taken: _Taken) -> str:
        if taken.token != self.token:
            raise NoLoop(f"the step of token {self.token} reads token {taken.token}")
        row, shape = self.steps.finder.row_dim(node), self.steps.finder.meaning.shape(node)
        own = tuple(E.var(f"own{dim}", extent) for dim, extent in enumerate(shape) if dim != row)
        given = taken.element, own, node.meta["val"].dtype
        if given not in self.tokens:
            self.tokens.append(given)
        return f"t{self.tokens.index(given)}"

    def _rows(self, size: Expr) -> str:
        """A size as a formula of the number of rows."""
        if size.op == "const":
            return str(size.value)
        if size is self.steps.finder.space.rows:
            return "rows"
        if size.op in ("add", "mul", "floordiv"):
            sign = {"add": " + ", "mul": " * ", "floordiv": " // "}[size.op]
            return f"({sign.join(self._rows(a) for a in size.args)})"
        raise NoLoop("a step has a size that does not follow from the number of rows")
