"""Sums over earlier tokens that can be carried: what a token writes, how it decays, and how it is read.

What is carried is affine in what was carried before, with coefficients of one token each:

    S_t = A_t S_(t-1) + write_t          out_t = read_t S_(t-1)  +  rest_t

The third token's element is unfolded (`unfold.py`), to terms that are products. A term of the second and the
third token shows what a token writes and how the next one reads it; the variables that both are summed over
are those of S. A term of the first and the third shows how S gets past the second: times a factor (a decay),
or through a product with one of its vectors, which puts another vector in its place (a delta rule). Sums with
decays, selective scans and delta rules differ in nothing else. This is a claim, read from three tokens.
Whether it holds is decided by running both (`passes/insert_kv_cache/carry.py`).
"""

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Unliftable, category_of
from attngraph.meaning.tokens.facts import Axes, Facts, Indices, Kind, Scan, own_variables, read_by
from attngraph.meaning.tokens.transitions import THIRD, Reading, RunningSum, joined
from attngraph.meaning.tokens.unfold import Factor, NoTerms, Term, Unfolding


@dataclasses.dataclass(frozen=True)
class Sums(Scan):
    """A value that is a sum of running sums and of a formula of its own token, `rest`.

    `variables`: those of the value's dimensions besides row and token. `through`: values that are known token
    by token, but were followed to what they are sums of: the difference of two sums is a sum of what lies
    between, and is not computed by subtracting.
    """

    sums: tuple[RunningSum, ...]
    rest: Expr
    variables: tuple[Expr, ...]
    through: frozenset[fx.Node]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        return read_by(*self.formulas)

    @property
    def formulas(self) -> tuple[Expr, ...]:
        """All of them."""
        return self.rest, *(e for s in self.sums for e in s.formulas)

    @property
    def reason(self) -> str:
        return f"{len(self.sums)} sum(s) over earlier tokens"


class _NotYet(NoTerms):
    """A loop over tokens has not come to the later ones."""


class SumFinder:
    """Looks for sums over earlier tokens in one graph, at most `budgets.SUM_ATTEMPTS` times.

    `refuted` says of values that are none what was found when they were computed as such sums; nor is what is
    computed from them looked at. `why_not`: the reason for each value that was looked at in vain.
    """

    def __init__(
        self, graph: ProgramGraph, facts: Facts, tokens: int, refuted: Mapping[fx.Node, str]
    ) -> None:
        self.facts, self.space, self.tokens, self._ruled_out = facts, facts.space, tokens, dict(refuted)
        self._meaning = Meaning.of(graph, True, True, {str(facts.space.tokens.value): tokens})
        self._left, self.why_not = budgets.SUM_ATTEMPTS, dict[fx.Node, str]()

    def find(self, node: fx.Node, axes: Axes) -> Sums | None:
        """How a value with these axes follows from carried sums, or None."""
        facts = self.facts
        if self.tokens <= THIRD or self._left <= 0 or any(len(digits) > 1 for digits in axes):
            return None
        mixing = (n for n in node.all_input_nodes if n in facts and facts.mixes(n))
        reason = next((self._ruled_out[n] for n in (node, *mixing) if n in self._ruled_out), None)
        if reason is not None:
            self._ruled_out[node] = self.why_not[node] = reason
            return None
        self._left -= 1
        try:
            return self._found(node, axes)
        except _NotYet:
            self._left += 1
            return None
        except (NoTerms, Unliftable) as why_not:
            self.why_not[node] = str(why_not)
            return None

    def _found(self, node: fx.Node, axes: Axes) -> Sums:
        """How a value with these axes follows from carried sums.

        Raises:
            NoTerms, Unliftable: it does not, as far as this can tell; says why.
        """
        meaning, space = self._meaning, self.space
        own = own_variables(meaning.shape(node))
        at: Indices = tuple(
            E.const(THIRD) if space.token in digits else (space.row or E.ZERO) if digits else variable
            for variable, digits in zip(own, axes, strict=True)
        )
        last = (E.const(self.tokens - 1) if index is E.const(THIRD) else index for index in at)
        if self._is_constant(node, tuple(last)):
            raise _NotYet("its later tokens have no value yet")
        problem = NoTerms()
        for through in dict.fromkeys((self._from_sums(), frozenset[fx.Node]())):
            try:
                unfolding = Unfolding(meaning, self.facts, self.tokens, through)
                terms = [_canonical(term) for term in unfolding.terms(node, at)]
                sums, rest = _claims(terms, meaning.values)
            except NoTerms as why_not:
                problem = why_not
            except RecursionError:
                problem = NoTerms("it is computed by too many operations")
            else:
                variables = tuple(v for v, digits in zip(own, axes, strict=True) if not digits)
                return Sums(tuple(sums), rest, variables, through)
        raise problem

    def _from_sums(self) -> frozenset[fx.Node]:
        """Sums over earlier tokens, and what is computed from them element by element."""
        found: set[fx.Node] = set()
        for node, fact in self.facts.items():
            moved = (
                node.op == "call_function"
                and fact.kind is Kind.TOKEN
                and category_of(node) in (Category.MOVEMENT, Category.POINTWISE)
            )
            if isinstance(fact.scan, Sums) or (moved and not found.isdisjoint(node.all_input_nodes)):
                found.add(node)
        return frozenset(found)

    def _is_constant(self, node: fx.Node, at: Indices) -> bool:
        """Whether an element is a number, as in a tensor of zeros that a loop has not yet written
        everywhere."""

        def is_plain(read: Expr) -> bool:
            return self.facts[read.value].kind in (Kind.FIXED, Kind.POSITION)

        element = self._meaning.element(node, at)
        while element.op == "read":
            if self.facts.known(element.value) is not None:
                return self._meaning.lift(element, is_plain).op == "const"
            element = self._meaning.element(element.value, element.args)
        return element.op == "const"


def _canonical(term: Term) -> Term:
    """The term with its summation variables named by where they occur, the earliest token's first."""
    if not term.over:
        return term
    plain = {v: E.var("n", v.args[0]) for v in term.over}

    def shape_of(factor: Factor) -> tuple[int, str]:
        return (THIRD + 1 if factor.token is None else factor.token, str(M.substitute(factor.value, plain)))

    order: dict[Expr, None] = {}
    for factor in sorted(term.factors, key=shape_of):
        order.update((n, None) for n in E.walk(factor.value) if n in term.over)
    names = {v: E.var(f"n{place}", v.args[0]) for place, v in enumerate(order)}
    return term.renamed(names)


def _claims(terms: Sequence[Term], tables: Collection[fx.Node]) -> tuple[list[RunningSum], Expr]:
    later = [t for t in terms if t.tokens and max(t.tokens) > THIRD]
    reads = ([n.value for f in t.factors if f.token is None for n in E.reads(f.value)] for t in later)
    if not all(any(value in tables for value in values) for values in reads):
        raise NoTerms("later tokens contribute to it")
    terms = [t for t in terms if t not in later]  # times entries of tables: zeros, if the claim holds
    left = [t for t in terms if not t.tokens - {THIRD}]
    readings = [Reading(t) for t in terms if t.tokens - {THIRD} and min(t.tokens) == 1]
    firsts = [t for t in terms if 0 in t.tokens]
    if not firsts:
        raise NoTerms("no earlier token contributes to it")
    for first in firsts:
        found = [(reading, way) for reading in readings for way in reading.ways(first)]
        if not found:
            raise NoTerms("the second token does not contribute to it as the first does")
        reading, way = min(found, key=lambda pair: pair[1].besides)
        reading.ways_on.append(way)
    if not all(reading.ways_on for reading in readings):
        raise NoTerms("what the tokens before it contribute follows no pattern that can be carried")
    together: dict[Hashable, list[Reading]] = {}
    for reading in readings:
        together.setdefault(reading.transition, []).append(reading)
    sums = [joined(group, left) for group in together.values()]
    return sums, M.add(*(t.value() for t in left), E.const(0.0))
