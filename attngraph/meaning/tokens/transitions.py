"""How what a token has written gets to a later one: read from terms of three tokens (`recurrence.py`).

A `Reading` is a term of the second and the third token. Each term of the first that the third reads in the
same way adds one `Way` past the second: times a factor, or through a vector of it.
"""

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.tokens.unfold import Term

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
        for part in _connected(factors, inner):
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
    for variable in sorted(over & value.free, key=lambda v: v.serial):
        value = M.total(variable, value)
    return value


def _connected(factors: Sequence[Expr], over: frozenset[Expr]) -> list[list[Expr]]:
    """Factors that share one of these variables, together."""
    parts: list[tuple[frozenset[Expr], list[Expr]]] = []
    for factor in factors:
        used = over & factor.free
        mine = [p for p in parts if p[0] & used]
        joint = used.union(*(p[0] for p in mine)), [*(f for p in mine for f in p[1]), factor]
        parts = [p for p in parts if p not in mine] + [joint]
    return [part for _, part in parts]


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
    """Whether this is a variable that a term is summed over (`recurrence.py` names them)."""
    return variable.op == "var" and str(variable.value).startswith("n")
