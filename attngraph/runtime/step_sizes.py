"""For which calls a decoder's graph is right: how many sequences, how many tokens in each, and other sizes.

What a trace decided about the number of tokens is asked of a row's whole length after each call: a row that
crosses to the other side of a branch cannot go on with what was kept, because the model computes all of its
tokens in another way there. The number of sequences is that of the call's rows; an engine's requests are
alone."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy

from attngraph.capture.guards import size_value
from attngraph.capture.sides import Sides, assumed, bound_above, in_words
from attngraph.ir.graph import ProgramGraph, holds
from attngraph.runtime.verify import tensors_of

ROWS, TOKENS = "sequences", "tokens"


@dataclasses.dataclass(frozen=True)
class Call:
    """The sizes of a call: rows, the lengths of those that have a result, other sizes by their symbol."""

    rows: int
    lengths: frozenset[int]
    others: Mapping[str, int] = dataclasses.field(default_factory=dict)


class StepSizes:
    """The sizes that a decoder's graph is for.

    Args:
        graph: of the step.
        names, shapes: the argument that each tensor belongs to which it was captured with, and their shapes.
        tokens: the argument that has the tokens. spread: those that calls may give with dimensions of size 1
            between rows and tokens, so that their shape is not the call's.
        sides: what its trace decided about sizes. single: whether it is for calls of one sequence alone.
    """

    def __init__(
        self, graph: ProgramGraph, names: Sequence[str], shapes: Sequence[Sequence[Any]], tokens: str,
        spread: Collection[str], sides: Sides, single: bool,
    ) -> None:  # fmt: skip
        assert graph.state is not None
        conditions, tables = graph.conditions, graph.state.most_tokens
        self.names, self.shapes, self.sides, self.single = list(names), shapes, sides, single
        self.tokens, self.spread = tokens, frozenset(spread)
        self.rows, self.length = (str(n) for n in shapes[self.names.index(tokens)][:2])
        self._conditions = [*assumed(conditions)]
        self._told = {self.rows: ROWS, self.length: TOKENS}
        self.asks = bool(self._conditions or sides.decisions or single)
        """Whether any call is to be looked at."""
        self._fault_of = functools.lru_cache(4096)(self._fault)
        traced = self._most_traced()
        self._whole_table = tables if traced is not None and traced + 1 == tables else None
        """A length that the trace excludes, because a slice of the whole table would be the table itself."""
        self._tables = tables
        limits = (tables, traced if self._whole_table is None else None)
        self.limit = min((n for n in limits if n is not None), default=None)

    @property
    def depends(self) -> bool:
        """Whether a row may come to a length for which the graph is not right, but for its limit."""
        every = (*self._conditions, *(d.relation for d in self.sides.decisions))
        own = [c for c in every if self.length in {str(s) for s in c.free_symbols}]
        return any(bound_above(c) is None or bound_above(c) != self.limit for c in own)

    @property
    def is_final(self) -> bool:
        """Whether the model takes no longer sequences than `limit`, in whatever graph."""
        longer = None if self.limit is None else self.sides.broken({self.length: self.limit + 1})
        return self.limit == self._tables or (longer is not None and longer.raises)

    def strictly(self) -> Iterator[Any]:
        """Conditions, besides the decisions, that hold for the sizes of the graph and for no others."""
        length, rows = (sympy.Symbol(name, integer=True) for name in (self.length, self.rows))
        if self.limit is not None:
            yield sympy.Le(length, self.limit)
        if self.single:
            yield sympy.Eq(rows, 1)
        table = self._whole_table
        for condition in self._conditions:
            if self._is_own(condition):
                at_table = table is not None and not holds(condition, {self.length: table})
                if at_table or bound_above(condition) is not None:
                    continue
            yield condition

    def _is_own(self, condition: Any) -> bool:
        """Whether a condition is one of the number of tokens alone."""
        return {str(s) for s in condition.free_symbols} == {self.length}

    def alike(self, call: Call, near: int) -> int | None:
        """A number of tokens about which the model would be given the same answers as about the longest row
        of a call, as far as it has asked: the nearest to `near`. None if there is no such number."""
        longest = max(call.lengths)

        def answers(tokens: int) -> list[bool]:
            sizes = {**call.others, self.rows: call.rows, self.length: tokens}
            return [holds(d.relation, sizes) for d in self.sides.decisions]

        tried = sorted(range(3, 4 * near), key=lambda n: (abs(n - near), n))
        return next((n for n in tried if answers(n) == answers(longest)), None)

    def of_inputs(self, inputs: Mapping[str, Any], rows: int, width: int) -> dict[str, int] | None:
        """The other sizes of a prompt's call, by symbol; None if the graph takes no inputs of this shape.
        `width`: the number of tokens in the longest row, padding included."""
        given = {name: tensors_of(value) for name, value in inputs.items()}
        sizes, formulas = {self.rows: rows, self.length: width}, list[tuple[Any, int]]()
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name == self.tokens or name in self.spread or name not in given:
                continue
            tensor = given[name].pop(0)
            if tensor.ndim != len(shape):
                return None
            for extent, number in zip(shape, tensor.shape, strict=True):
                if getattr(extent, "is_Symbol", False):
                    sizes.setdefault(str(extent), number)
                formulas.append((extent, number))
        for extent, number in formulas:
            if number != (extent if isinstance(extent, int) else size_value(extent, sizes)):
                return None
        return {name: size for name, size in sizes.items() if name not in (self.rows, self.length)}

    def fault(self, call: Call) -> str:
        """Why the graph is not right for a call; "" if it is."""
        if not self.asks:
            return ""
        others = tuple(call.others.items())
        faults = (self._fault_of(call.rows, length, others) for length in sorted(call.lengths))
        return next(filter(None, faults), "")

    def _fault(self, rows: int, length: int, others: tuple[tuple[str, int], ...]) -> str:
        if self.single and rows != 1:
            return f"the graph is for calls of one sequence, and there are {rows}"
        sizes = {**dict(others), self.length: length, self.rows: rows}
        decision = self.sides.broken(sizes)
        if decision is not None:
            does = "raises an error" if decision.raises else "does something else"
            return (
                f"the model asks at {decision.line} whether {in_words(decision.relation, self._told)}, and "
                f"{does} where that is not so, as for {_counted(rows, length)}"
            )
        shorter = {**sizes, self.length: length - 1}
        for condition in self._conditions:
            is_whole = length == self._whole_table and self._is_own(condition) and holds(condition, shorter)
            if not is_whole and not holds(condition, sizes):
                words = in_words(condition, self._told)
                return f"the graph is for sizes with {words}, which is not so for {_counted(rows, length)}"
        return ""

    def _most_traced(self) -> int | None:
        """The longest sequence the trace is valid for, unless the model treats longer ones otherwise."""
        own = [c for c in self._conditions if self._is_own(c)]
        found = min((n for c in own if (n := bound_above(c)) is not None), default=None)
        if found is None:
            return None
        while found > 0 and not all(holds(c, {self.length: found}) for c in own):
            found -= 1
        longer = self.sides.broken({self.length: found + 1})
        return found if longer is None or longer.raises else None


def _counted(rows: int, length: int) -> str:
    return f"{rows} sequence{'s' * (rows != 1)} of {length} token{'s' * (length != 1)}"
