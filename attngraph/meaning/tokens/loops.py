"""Loops over tokens: what one step hands to the next, found in the graph of a loop that was unrolled.

A loop over tokens is traced as equal operations, once for each token. Each operation belongs to the latest
token that it is computed from. What the steps up to a token hand to later ones is a minimum cut between the
operations of both (`networkx.minimum_cut`, bytes of a row as capacities), and the operations from one cut to
the next are one step:

    handed', out = step(handed, token)

One step is taken as the pattern. All others must be the same operations of the same operands, with their own
token in the place of its; only the first may differ, as it has nothing before it. Nothing is assumed about
what a step computes, so this is how running maxima, gates and cells are carried. (Sums over earlier tokens
are found before, by `recurrence.py`: they need no steps.)
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import networkx as nx
import torch
from torch import fx

from attngraph.ir.graph import is_size, op_name, source_of
from attngraph.ir.language import Expr
from attngraph.ir.walk import minimum_cut, operands_first
from attngraph.meaning.rule import Unliftable
from attngraph.meaning.tokens.facts import Axes, Facts, Indices, Scan, own_variables, read_by
from attngraph.meaning.tokens.unrolled import NoLoop, StepWriter, Unrolled

PATTERN = 3
"""The token whose step is the pattern: the first ones may be computed in another way."""
_AGED = 1 << 10
"""A value counts for so many of the next token's: few small values of every token so far are no state."""


Handed = tuple[tuple[int, ...], torch.dtype]
"""A value that one step of a loop hands to the next: the shape and dtype of one row's."""


@dataclasses.dataclass(frozen=True)
class TokenLoop(Scan):
    """A value that is computed token after token: each step takes what the one before handed on.

    `program`: a step program (`ir/language/step_program.py`). `taken`: an element of each value of the token
    that it takes, with the variables of its dimensions besides the row, and its dtype. `shared`: values that
    all tokens share. `handed`: what is handed on. `result`: the place in the program's first result, besides
    the row's, of the element at `variables`.
    """

    program: str
    taken: tuple[tuple[Expr, tuple[Expr, ...], torch.dtype], ...]
    shared: tuple[fx.Node, ...]
    handed: tuple[Handed, ...]
    result: tuple[Expr, ...]
    variables: tuple[Expr, ...]
    reason = "a loop over tokens, one step for each"

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        return (*read_by(*(element for element, _, _ in self.taken)), *self.shared)


class LoopFinder:
    """Looks for loops over tokens in one graph that was traced for a number of tokens."""

    def __init__(self, facts: Facts, tokens: int) -> None:
        self.nodes, self.tokens = Unrolled(facts), tokens
        self.why_not: dict[fx.Node, str] = {}

    def find(self, node: fx.Node, axes: Axes) -> TokenLoop | None:
        """How a value with these axes is computed by steps, or None."""
        unrolled = self.nodes.space.is_of_one_length and self.tokens > PATTERN + 2
        if not unrolled or self.nodes.space.row is None or any(len(digits) > 1 for digits in axes):
            return None
        try:
            results = self._results(node, axes)
            return None if results is None else _Steps(self.nodes, *results).loop()
        except (NoLoop, Unliftable) as why_not:
            self.why_not[node] = str(why_not)
            return None

    def _results(self, node: fx.Node, axes: Axes) -> tuple[list[fx.Node], Indices, Indices] | None:
        """The node that computes each token's part of a value, and which element of it the value has where;
        None where a token's part is not computed, as in one that a loop has not yet filled."""
        own = own_variables(self.nodes.meaning.shape(node))
        found: list[tuple[fx.Node, Indices]] = []
        for token in reversed(range(self.tokens)):
            at = self.nodes.space.numbered(axes, own, token)
            element = self.nodes.followed(self.nodes.meaning.element(node, at))
            if element.op != "read" or self.nodes.counts_tokens(element.value):
                return None
            found.append((element.value, element.args))
        results, places = zip(*reversed(found), strict=True)
        row = self.nodes.row_dim(results[-1])
        if len(set(places)) > 1 or row is None or places[0][row] is not self.nodes.space.row:
            return None
        variables = tuple(v for v, digits in zip(own, axes, strict=True) if not digits)
        return list(results), tuple(p for dim, p in enumerate(places[0]) if dim != row), variables


class _Steps:
    """The steps that compute `results`, a node a token; `place`, `variables`: as `TokenLoop` has them."""

    def __init__(self, nodes: Unrolled, results: list[fx.Node], place: Indices, variables: Indices) -> None:
        self.nodes, self.results, self.place, self.variables = nodes, results, place, variables
        self.order = operands_first([n for n in results if not self.nodes.is_shared(n)], self._operands)
        self.levels: dict[fx.Node, int] = {}
        for node in self.order:
            taken = nodes.taken(node)
            if taken is None and nodes.counts_tokens(node):
                raise NoLoop(f"a step reads {_named(node)}, which has all tokens")
            below = max((self.levels.get(n, -1) for n in self._operands(node)), default=-1)
            self.levels[node] = below if taken is None else taken.token

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        if self.nodes.taken(node) is not None:
            return []
        return [n for n in node.all_input_nodes if not is_size(n) and not self.nodes.is_shared(n)]

    def loop(self) -> TokenLoop:
        """Raises NoLoop where the steps are not equal."""
        cut = self._cut(PATTERN - 1)
        if not cut:
            raise NoLoop("no step hands anything to the next")
        self.numbers = {node: number for number, node in enumerate(cut)}
        handed = self._handed()
        text = StepWriter(self.nodes, PATTERN, {n: f"c{number}" for n, number in self.numbers.items()})
        step = text.part([self.results[PATTERN], *handed])
        first = StepWriter(self.nodes, 0, {}, text)
        begin = first.part([self.results[0], *self.first])
        program = "\n".join(["begin:", *begin, "step:", *step])
        about = tuple(known for n in handed if (known := self._about(n)) is not None)
        return TokenLoop(program, tuple(text.tokens), tuple(text.shared), about, self.place, self.variables)

    # --- what is handed on ---

    def _cut(self, token: int) -> list[fx.Node]:
        """What the steps up to a token hand on: a cut with the fewest bytes, the nearest to its uses."""
        sizes: dict[fx.Node, float | None] = {}
        for node in (n for n in self.order if 0 <= self.levels[n] <= token):
            about, age = self._about(node), token - self.levels[node]
            sizes[node] = None
            if about is not None:
                sizes[node] = (math.prod(about[0]) * about[1].itemsize or 1) * _AGED**age

        def operands(node: fx.Node) -> list[fx.Node]:
            return [n for n in self._operands(node) if n in sizes]

        later = [n for n in self.results[token + 1 :] if n in sizes]
        later += [o for n in self.order if self.levels[n] > token for o in operands(n)]
        try:
            return minimum_cut(sizes, operands, later)
        except nx.NetworkXUnbounded:
            raise NoLoop("what a step hands on is no tensor with a dimension for the rows") from None

    def _about(self, node: fx.Node) -> Handed | None:
        """What a row has of a value, where that is of a fixed shape."""
        value, row = node.meta["val"], self.nodes.row_dim(node)
        own = [n for dim, n in enumerate(getattr(value, "shape", ())) if dim != row]
        return (tuple(own), value.dtype) if row is not None and all(isinstance(n, int) for n in own) else None

    def _handed(self) -> list[fx.Node]:
        """What the pattern's step hands on: a node for each of the cut before it. All steps are compared with
        the pattern; `self.first` is what the first one hands on."""
        last, count = len(self.results) - 1, len(self.numbers)
        at: list[dict[int, fx.Node]] = [{} for _ in range(len(self.results))]
        """For each token, what its step hands on."""
        at[PATTERN - 1] = {number: node for node, number in self.numbers.items()}
        for token in range(PATTERN, last + 1):
            self._compare(self.results[PATTERN], token, self.results[token], at[token - 1])
        waiting, done = set(at[PATTERN]), set[int]()
        while waiting:
            number = waiting.pop()
            done.add(number)
            for token in range(PATTERN, last):
                if number in at[token]:
                    self._compare(at[PATTERN][number], token, at[token][number], at[token - 1])
            waiting |= set(at[PATTERN]) - done
        otherwise = NoLoop("what a step hands on is not used in the same way by later ones")
        if len(done) < count:
            raise otherwise
        handed = [at[PATTERN][number] for number in range(count)]
        for token in reversed(range(1, PATTERN)):
            self._compare(self.results[PATTERN], token, self.results[token], at[token - 1])
            for number, node in enumerate(handed):
                if number not in at[token]:
                    raise otherwise
                self._compare(node, token, at[token][number], at[token - 1])
        if len(at[0]) < count:
            raise NoLoop("the first step does not hand on what later ones do")
        self.first = [at[0][number] for number in range(count)]
        return handed

    # --- equal steps ---

    def _compare(self, pattern: Any, token: int, other: Any, found: dict[int, fx.Node]) -> None:
        """Note what a step takes where the pattern takes the cut; NoLoop if the operations differ."""
        seen: set[tuple[fx.Node, fx.Node]] = set()
        stack = [(pattern, other)]
        while stack:
            one, two = stack.pop()
            if not isinstance(one, fx.Node) or not isinstance(two, fx.Node):
                stack += self._parts(one, two, token)
            elif (one, two) not in seen:
                seen.add((one, two))
                if one in self.numbers:
                    if found.setdefault(self.numbers[one], two) is not two:
                        raise NoLoop(f"the steps of tokens {PATTERN} and {token} take other values")
                elif not self._is_same(one, two, token):
                    own, others = ((n.target, n.args, n.kwargs) for n in (one, two))
                    stack += self._parts(own, others, token)

    def _parts(self, one: Any, two: Any, token: int) -> Iterator[tuple[Any, Any]]:
        if isinstance(one, (tuple, list)) and isinstance(two, (tuple, list)) and len(one) == len(two):
            yield from zip(one, two, strict=True)
        elif isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
            yield from ((one[key], two[key]) for key in one)
        elif type(one) is not type(two) or not (one == two or (one != one and two != two)):
            raise _other_step(token)

    def _is_same(self, one: fx.Node, two: fx.Node, token: int) -> bool:
        """Whether two nodes are known to be the same, each of its token; else their operands are compared."""
        if is_size(one) and is_size(two):
            sizes = [self.nodes.size(n.meta["val"]) for n in (one, two)]
            if sizes[0] is sizes[1]:
                return True
        shared = self.nodes.is_shared(one)
        if one is two and (shared or token == PATTERN):
            return True
        computed = one.op == two.op == "call_function" and not (is_size(one) or is_size(two))
        if not computed or shared != self.nodes.is_shared(two):
            raise _other_step(token)
        taken, other = (None if shared else self.nodes.taken(n) for n in (one, two))
        if (taken is None) != (other is None):
            raise _other_step(token)
        if taken is None or other is None:
            return False
        if taken.element is not other.element or taken.token - PATTERN != other.token - token:
            raise NoLoop(f"the step of token {token} does not read its token as the others do")
        return True


def _other_step(token: int) -> NoLoop:
    return NoLoop(f"the step of token {token} does not compute what the others do")


def _named(node: fx.Node) -> str:
    """A value as users know it."""
    if node.op == "placeholder":
        return "an argument"
    return " at ".join(part for part in (f"what {op_name(node)} gives", source_of(node)) if part)
