"""Sums over earlier tokens that can be carried: what a token writes, how it decays, and how it is read.

What is carried is affine in what was carried before, with coefficients of one token each:

    S_t = A_t S_(t-1) + write_t          out_t = read_t S_(t-1)  +  rest_t

The third token's element is unfolded (`unfold.py`), to terms that are products. A term of the second and the
third token shows what a token writes and how the next one reads it; the variables that both are summed over
are those of S (`Reading`). A term of the first and the third shows how S gets past the second (`Way`): times
a factor (a decay), or through a product with one of its vectors, which puts another vector in its place (a
delta rule). Sums with decays, selective scans and delta rules differ in nothing else. This is a claim, read
from three tokens. Whether it holds is decided by running both (`passes/insert_kv_cache/carry.py`).
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from torch import fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language import E, Expr
from attngraph.ir.walk import connected
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, Unliftable, category_of
from attngraph.meaning.tokens.facts import Axes, Facts, Indices, Kind, Scan, own_variables, read_by
from attngraph.meaning.tokens.unfold import Factor, NoTerms, Term, Unfolding

THIRD = 2
VARIABLES = 5
"""Variables of one term's read, of which every order is tried."""
_Counter = collections.Counter[Expr]


@dataclasses.dataclass(frozen=True)
class Way:
    """Past one token: `factor` times what was carried; or, with `across`, (left, right): what the vector
    `right` makes of it, at the places of the vector `left`.

    `decays`: the token's factors in `factor`. `besides`: how many factors of no token it has.
    """

    factor: Expr
    across: tuple[Expr, Expr] | None
    decays: tuple[Expr, ...] = dataclasses.field(default=(), compare=False)
    besides: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class RunningSum:
    """A value that is read from what is carried from token to token.

        S_t = decay_t * S_(t-1) + sum of left_t (right_t . S_(t-1)) + write_t
        out_t = read_t . S_t   (not `inclusive`: read_t . S_(t-1))

    All are formulas of one token; `over`: the variables that read and write are summed over, and (left,
    right) of `across`.
    """

    read: Expr
    write: Expr
    decay: Expr
    over: tuple[Expr, ...]
    inclusive: bool
    across: tuple[tuple[Expr, Expr], ...] = ()

    @property
    def formulas(self) -> tuple[Expr, ...]:
        """All of them."""
        return self.read, self.write, self.decay, *(e for pair in self.across for e in pair)


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
        """How a value with these axes follows from carried sums. Raises `NoTerms`, `Unliftable`: it does not,
        as far as this can tell; says why."""
        meaning = self._meaning
        own = own_variables(meaning.shape(node))
        if self._is_constant(node, self.space.numbered(axes, own, self.tokens - 1)):
            raise _NotYet("its later tokens have no value yet")
        problem = NoTerms()
        for through in dict.fromkeys((self._from_sums(), frozenset[fx.Node]())):
            try:
                unfolding = Unfolding(meaning, self.facts, self.tokens, through)
                at = self.space.numbered(axes, own, THIRD)
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


class Reading:
    """What the second token writes and how the third reads it."""

    def __init__(self, second: Term) -> None:
        self.term = second
        self.write, self.read = of(second, 1), of(second, THIRD)
        crossing = second.over & _free(self.write) & _free(self.read)
        self.between = sorted(crossing, key=lambda v: str(v.value))
        """The variables that what is read and what was written are summed over."""
        self.written = total(self.write.elements(), second.over - crossing)
        self.value_read = total(self.read.elements(), second.over - crossing)
        self.ways_on: list[Way] = []

    @property
    def transition(self) -> Hashable:
        """What the ways past a token make of what was written."""
        return self.written, frozenset(self.ways_on)

    def ways(self, first: Term) -> Iterator[Way]:
        """How what the first token writes gets past the second, if it writes and the third reads the same."""
        if of(first, 0) != self.write:
            return
        for names in _renamings(of(first, THIRD), self.read, first.over):
            crossing = {v: n for v, n in names.items() if n in self.between}
            way = self._way(first, crossing, frozenset(names) - frozenset(crossing))
            if way is not None:
                yield way
                return

    def _way(self, first: Term, crossing: Mapping[Expr, Expr], inner: frozenset[Expr]) -> Way | None:
        """`crossing`: the variables along which the third token reads, by those of what is carried; `inner`:
        others of what it reads."""
        others = quotient(first, self.term)
        decays = tuple(of(first, 1).elements())
        factors, between = [*others, *decays], set(self.between)
        if inner & _free((*factors, *self.write)):
            return None
        if all(v is n for v, n in crossing.items()):
            factor = total(factors, first.over - between)
            return Way(factor, None, decays, len(others))
        if crossing.keys() & between:
            return None  # some variables go past the second token, others do not
        left, right = [E.ONE], [E.ONE]
        inner = first.over - between - crossing.keys()
        for part in connected(factors, lambda factor: inner & factor.free):
            of_left, of_right = _free(part) & crossing.keys(), _free(part) & between
            if of_left and of_right:
                return None  # a matrix that is no product of two vectors
            (right if of_right else left).append(total(part, inner))
        return Way(E.ONE, (M.substitute(M.mul(*left), dict(crossing)), M.mul(*right)), (), len(others))


def joined(readings: Sequence[Reading], own: list[Term]) -> RunningSum:
    """The running sum that these read, which have one transition. A term of `own`, those of the third token
    alone, that is a part of the sum is removed."""
    reading = readings[0]
    over, ways = tuple(reading.between), reading.ways_on
    if len(readings) == 1 and len(ways) == 1 and ways[0].across is None:
        return _with_own(reading, ways[0], over, own)
    others = {(r.term.number, frozenset(of(r.term, None).items())) for r in readings}
    common = M.mul(E.const(reading.term.number), *of(reading.term, None).elements())
    if len(others) > 1:
        read = M.add(*(M.mul(_other(r.term), r.value_read) for r in readings))
        write = reading.written
    else:
        read, write = M.add(*(r.value_read for r in readings)), M.mul(common, reading.written)
    decay = M.add(*(way.factor for way in ways if way.across is None), E.const(0.0))
    return RunningSum(read, write, decay, over, False, tuple(w.across for w in ways if w.across is not None))


def _with_own(reading: Reading, way: Way, over: tuple[Expr, ...], own: list[Term]) -> RunningSum:
    """A sum with a decay; what a token reads of its own like the rest belongs to it."""
    second, decays = reading.term, collections.Counter(way.decays)
    wanted = reading.write + (reading.read - decays)
    third = next((t for t in own if t.over == second.over and of(t, THIRD) == wanted), None)
    if decays - reading.read or third is None or of(third, None) - of(second, None):
        return RunningSum(reading.value_read, M.mul(_other(second), reading.written), way.factor, over, False)
    own.remove(third)
    read = total((reading.read - decays).elements(), second.over - set(over))
    decay = M.mul(*quotient(second, third), *decays.elements())
    return RunningSum(read, M.mul(_other(third), reading.written), decay, over, True)


def _other(term: Term) -> Expr:
    """The factors that belong to no token."""
    return M.mul(E.const(term.number), *of(term, None).elements())


def of(term: Term, token: int | None) -> _Counter:
    """The factors of a token."""
    return collections.Counter(f.value for f in term.factors if f.token == token)


def quotient(longer: Term, shorter: Term) -> list[Expr]:
    """What one term has more than another, apart from factors of tokens."""
    above, below = of(longer, None), of(shorter, None)
    more, less = above - below, below - above
    return [E.const(longer.number / shorter.number), *more.elements(), *(M.recip(f) for f in less.elements())]


def total(factors: Iterable[Expr], over: frozenset[Expr]) -> Expr:
    """The product of factors, summed over variables."""
    value = M.mul(*factors)
    return M.totals(sorted(over & value.free, key=lambda v: v.order), value)


def _free(factors: Iterable[Expr]) -> frozenset[Expr]:
    return frozenset[Expr]().union(*(f.free for f in factors))


def _renamings(given: _Counter, wanted: _Counter, over: frozenset[Expr]) -> Iterator[dict[Expr, Expr]]:
    """How variables of these factors can be renamed so that they are the wanted ones."""
    mine = sorted(over & _free(given), key=lambda v: str(v.value))
    others = sorted((v for v in _free(wanted) if _is_summed(v)), key=lambda v: str(v.value))
    if len(mine) != len(others) or len(mine) > VARIABLES or given.total() != wanted.total():
        return
    for order in itertools.permutations(others):
        names = dict(zip(mine, order, strict=True))
        if any(v.args[0] is not n.args[0] for v, n in names.items()):
            continue
        if collections.Counter(M.substitute(f, names) for f in given.elements()) == wanted:
            yield names


def _is_summed(variable: Expr) -> bool:
    """Whether this is a variable that a term is summed over (`_canonical` names them)."""
    return variable.op == "var" and str(variable.value).startswith("n")
