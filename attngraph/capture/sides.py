"""Sizes in a trace: the side that it took of every branch on them, and where it stops because of them.

A trace follows one side of `if n > 6`, and torch takes for granted that a symbolic size is at least 2, so
that it never asks `n > 1` again. A graph is right for a call whose sizes are on the trace's side of all that
was decided. Where a size is 1, the model may do the same though it asks: such sides are compared with the
model when the graph is made (`api/compare_sides.py`), and are `same` then.

Window partitions, strides and paddings of an image's sides give formulas of nested quotients and remainders.
torch compares them at every operation, which takes seconds for each; with numbers in place of these sizes,
the same trace takes milliseconds. (Sums and products are cheap however long they are.) A trace that must
hold for any number of tokens also stops where it is about to hold for some alone, and once where it may come
to that: where it has looked at many quotients of that number (chunks, paddings).
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attngraph.capture.instead import instead
from attngraph.ir import budgets
from attngraph.ir.graph.formula import holds, python_text

_ORDERS = sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt
_FEW, _MANY = 4, 1 << 24
"""A few numbers, and more than any size that is asked for."""


class Decision(NamedTuple):
    """A relation between sizes that a trace took to hold, the line that asked, and whether the model only
    raises an error where it does not."""

    relation: Any
    line: str
    raises: bool = False


@dataclasses.dataclass(frozen=True)
class Same:
    """Where these sizes are these numbers, the graph gives what the model gives, if these relations hold."""

    at: frozenset[tuple[str, int]]
    relations: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sides:
    """What a trace decided about sizes, and for which of them the graph is right nevertheless."""

    decisions: tuple[Decision, ...] = ()
    same: tuple[Same, ...] = ()

    @property
    def symbols(self) -> frozenset[str]:
        """The sizes that were asked for."""
        return frozenset(str(s) for d in self.decisions for s in d.relation.free_symbols)

    @functools.cached_property
    def apart(self) -> dict[str, frozenset[int]]:
        """Of each size that was asked for, the numbers that are compared apart: 1, and the few for which a
        decision fails."""
        found = {name: {1} for name in self.symbols}
        for relation in {d.relation for d in self.decisions}:
            for symbol in relation.free_symbols:
                found[str(symbol)] |= exceptions(relation) or set()
        return {name: frozenset(numbers) for name, numbers in found.items()}

    def at(self, sizes: Mapping[str, int]) -> frozenset[tuple[str, int]]:
        """Which of the sizes are such numbers."""
        return frozenset((name, sizes[name]) for name, of in self.apart.items() if sizes.get(name) in of)

    def broken(self, sizes: Mapping[str, int]) -> Decision | None:
        """A decision that does not hold for these sizes; None if the graph is right for them."""
        failing = next((d for d in self.decisions if not holds(d.relation, sizes)), None)
        if failing is None:
            return None
        same = next((s for s in self.same if s.at == self.at(sizes)), None)
        if same is None:
            return failing
        other = next((r for r in same.relations if not holds(r, sizes)), None)
        return None if other is None else Decision(other, failing.line)

    def renamed(self, symbols: Mapping[str, Any]) -> "Sides":
        """The same of sizes with other symbols, by their names."""

        def of(relation: Any) -> Any:
            return relation.xreplace({s: symbols[str(s)] for s in relation.free_symbols if str(s) in symbols})

        decisions = tuple(d._replace(relation=of(d.relation)) for d in self.decisions)
        numbers = [frozenset((str(symbols.get(name, name)), n) for name, n in s.at) for s in self.same]
        relations = (tuple(map(of, s.relations)) for s in self.same)
        return Sides(decisions, tuple(map(Same, numbers, relations)))

    def strictly(self) -> Iterator[Any]:
        """Conditions that hold for the sizes for which the graph is right, and for no others."""
        for relation in dict.fromkeys(d.relation for d in self.decisions):
            own = {str(s) for s in relation.free_symbols}
            sets = [s for s in self.same if any(name in own for name, _ in s.at)]
            if sets and self._is_right_where_it_fails(relation):
                continue
            yield sympy.Or(relation, *(self._where(same) for same in sets)) if sets else relation

    def _is_right_where_it_fails(self, relation: Any) -> bool:
        """Whether for each number for which this relation of one size fails, the graph was found right with
        all that other sizes may be."""
        failing = exceptions(relation)
        if failing is None:
            return False
        (name,) = map(str, relation.free_symbols)
        compared = {place for same in self.same for place in same.at}
        beside = [of for of in self.apart.items() if of[0] != name and of[0] in dict(compared)]
        others = itertools.product(*([(), *((other, n) for n in of)] for other, of in beside))
        whole = {same.at for same in self.same if not same.relations}
        sets = [frozenset(place for place in places if place) for places in others]
        return all(places | {(name, n)} in whole for places in sets for n in failing)

    def _where(self, same: Same) -> Any:
        """The condition that these sizes are these numbers, and the others none that are compared apart."""
        symbols = {str(s): s for d in self.decisions for s in d.relation.free_symbols}
        known = dict(same.at)
        equal = (sympy.Eq(symbols[name], n) for name, n in sorted(known.items()))
        beside = sorted(self.apart.keys() - known)
        others = (sympy.Ne(symbols[name], n) for name in beside for n in sorted(self.apart[name]))
        return sympy.And(*equal, *others, *same.relations)


UNASKED = Sides()
"""Of a graph whose trace decided nothing about sizes."""


def assumed(conditions: Sequence[Any]) -> Iterator[Any]:
    """The conditions of a graph but for those that say that a size is at least 2, as torch takes all symbolic
    sizes to be."""
    return (c for c in dict.fromkeys(conditions) if not is_of_ones(c))


def is_of_ones(relation: Any) -> bool:
    """Whether a relation is of one size, and holds for all numbers from 2 on."""
    failing = exceptions(relation)
    return failing is not None and failing <= {1}


@functools.lru_cache(maxsize=1 << 12)
def exceptions(relation: Any) -> frozenset[int] | None:
    """The numbers from 1 on for which a relation of one size fails; None if they may be more than a few."""
    symbols = list(relation.free_symbols)
    if len(symbols) != 1 or not isinstance(relation, (*_ORDERS, sympy.Ne)):
        return None
    (symbol,) = symbols
    difference = sympy.expand(relation.lhs - relation.rhs)
    if not difference.is_polynomial(symbol) or sympy.degree(difference, symbol) > 1:
        return None
    if isinstance(relation, sympy.Ne):
        root = -difference.coeff(symbol, 0) / difference.coeff(symbol, 1)
        return frozenset({int(root)} if root.is_integer and root > 0 else ())
    if not all(holds(relation, {str(symbol): n}) for n in (_FEW + 1, _MANY)):
        return None
    return frozenset(n for n in range(1, _FEW + 1) if not holds(relation, {str(symbol): n}))


def in_words(relation: Any, names: Mapping[str, str]) -> str:
    """A relation as users may read it: `tokens > 6`."""
    return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), python_text(relation))


def bound_above(relation: Any) -> int | None:
    """The largest number of the one size of a relation that is linear in it for which it holds; None if there
    is none."""
    symbols = list(relation.free_symbols)
    if len(symbols) != 1 or not isinstance(relation, _ORDERS):
        return None
    (symbol,) = symbols
    if not all(side.is_polynomial(symbol) and sympy.degree(side, symbol) < 2 for side in relation.args):
        return None

    def fails(number: int) -> bool:
        return not holds(relation, {str(symbol): number})

    return None if fails(0) or not fails(_MANY) else bisect.bisect_left(range(_MANY), True, key=fails) - 1


class SizeProblem(Exception):
    """Sizes are better numbers. `symbols`: their names. `may_hold`: it may yet come to a graph for any."""

    def __init__(self, reason: str, symbols: frozenset[str], may_hold: bool = False) -> None:
        super().__init__(reason)
        self.symbols, self.may_hold = symbols, may_hold


FIXED = "how often a loop runs, or another plain number, follows from how many tokens there are"
_LONG = "formulas of its sizes become too long"
_QUOTIENTS = "it looks at many quotients of how many tokens there are"


@functools.lru_cache(maxsize=1 << 12)
def _names(formula: sympy.Expr) -> frozenset[str]:
    return frozenset(map(str, formula.free_symbols))


def short_formulas(
    kept: Callable[[frozenset[str]], object], any_number: bool
) -> contextlib.AbstractContextManager[None]:
    """Raise SizeProblem where torch is about to evaluate a formula whose quotients or remainders exceed the
    budget (with the sizes in the innermost of these), and where it is about to make a number of a formula of
    sizes of which `kept` is true. Without `any_number`, also at many quotients of such sizes."""
    short: set[Any] = set()
    quotients: set[Any] = set()

    def look(formula: Any) -> None:
        if isinstance(formula, sympy.Expr) and kept(names := _names(formula)):
            raise SizeProblem(FIXED, names)
        if not isinstance(formula, sympy.Basic) or formula in short:
            return
        parts = formula.atoms(sympy.Function)
        if any(part.count_ops() > budgets.SIZE_OPS for part in parts):
            innermost = [p for p in parts if not any(arg.has(sympy.Function) for arg in p.args)]
            raise SizeProblem(_LONG, frozenset(str(s) for part in innermost for s in part.free_symbols))
        short.add(formula)
        if not any_number and parts and kept(names := _names(formula)):
            quotients.add(formula)
            if len(quotients) > budgets.QUOTIENTS_OF_TOKENS:
                raise SizeProblem(_QUOTIENTS, names, may_hold=True)

    def looking(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def evaluated(env: ShapeEnv, formula: Any, *args: Any, **kwargs: Any) -> Any:
            look(formula)
            return evaluate(env, formula, *args, **kwargs)

        return evaluated

    return instead((ShapeEnv, "evaluate_expr", looking))
