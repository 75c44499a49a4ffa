"""From a quotient of sums to the keys that it runs over: pieces that tile one tensor are one.

`partial_sums.py` gives the result of a loop over keys as sums of exp(score) * value over sums of exp(score).
Here the terms above are paired with those below; each pair is a piece of the keys: a block of them, or one.
A piece's place among all keys is where its values lie in the tensor that they are a slice of. Written over
that place, the pieces of a loop have one formula; pieces that have it, and whose places follow each other,
become one piece. What one formula does not cover stays a piece of its own.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import fx

from attngraph.ir.graph import op_name, source_of
from attngraph.ir.language import WEIGHT, E, Expr
from attngraph.meaning.algebra import M, open_sums
from attngraph.meaning.algebra.fractions import Sum, Term, Value
from attngraph.meaning.attention.normaliser import Refusal
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Category, is_part, tried

NOT_ALIKE = (
    "the {} blocks of its keys are not scaled alike in the sum and in what divides it: a rescaling by the "
    "change of the running maximum is missing, or uses another maximum"
)
NOT_RESCALED = (
    "the {} blocks of its keys are added up with different maxima subtracted: what has been added up must be "
    "rescaled whenever the maximum changes"
)
ADDED = (
    "a number is added to what divides it, after maxima of its scores were subtracted from them: leave out "
    "the one or the other"
)
OVERLAP = "some keys are in more than one of the {} blocks of its keys, so they count more than once"
NOT_DIVIDED = (
    "its keys come in {} blocks whose sums are added up, but not divided by the sum of the exponentials of "
    "all of these"
)
CHANGED = "what divides it is changed by {} at {}, so it is not the sum of the exponentials of its keys"
NO_VALUES = "what divides it counts the exponentials of keys whose values are not added up"
NO_WEIGHTS = (
    "the values of some keys are added up, but what divides the sum does not count their exponentials"
)
VALUES_ARE_EXPONENTIALS = (
    "its values are exponentials themselves, and where keys come in {} blocks these are not told from the "
    "exponentials of the scores"
)
ONE_BY_ONE = (
    "some of its keys are taken one by one, and are not one formula of the key's place: compute the keys and "
    "values of all tokens before the loop"
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some of the keys: `keys` are their variables, none for a single key. `score` is what is exponentiated,
    up to what all pieces share; `weighted` is the weight, as the leaf `p`, times the value."""

    keys: tuple[Expr, ...]
    score: Expr
    weighted: Expr

    def at(self, names: Mapping[Expr, Expr]) -> tuple[Expr, Expr]:
        """Both formulas with other variables."""
        return M.substitute(self.score, names), M.substitute(self.weighted, names)

    def moved(self, place: Expr) -> tuple[Expr, Expr]:
        """Both with the one key at another place."""
        score, weighted = self.at({self.keys[0]: place})
        return M.canonical_binders(score), weighted


# --- pairs of terms ---


@dataclasses.dataclass(frozen=True)
class Separated:
    """The pieces of a quotient of sums, and the sinks that its divisor adds up besides. Where its terms are
    no pairs, `divisor` has the pieces below, and `problem` says what is wrong if they are other keys."""

    pieces: Sequence[Piece]
    sinks: Sequence[Expr] = ()
    divisor: Sequence[Piece] = ()
    problem: Refusal | None = None


def separate(value: Value, fresh: Callable[[Expr], Expr]) -> Separated | Refusal | None:
    """A quotient of sums of exponentials as pieces of keys; None where it is zero."""
    count = sum(len(part.terms) for part in value)
    if not value:
        return None
    powers = value[0].powers
    if len(value) > 1 or list(powers.values()) != [-1]:
        divided = len(value) == 1 and powers
        return Refusal((NOT_ALIKE if divided or len(value) > 1 else NOT_DIVIDED).format(count))
    below = value[0].sums[next(iter(powers))]
    above = _opened_terms(value[0].terms)
    if len(above) < len(value[0].terms):
        return Refusal(NOT_ALIKE.format(count))
    shift = _shift(above, below)
    if shift is None:
        problem = _mismatch(above, below, count)
        pieces, divisor = ([_piece(x, x.exponent, x.number, fresh) for x in terms]
                           for terms in (above, _opened_terms(below)))  # fmt: skip
        alike = len(divisor) == len(below) and all(p.weighted is WEIGHT for p in divisor)
        return Separated(pieces, [], divisor, problem) if alike else problem
    used = {(M.sub(x.exponent, shift), x.weights) for x in above}
    extra = [(term, number) for term, number in below.items() if term not in used]
    scale = below[M.sub(above[0].exponent, shift), above[0].weights]
    pieces = []
    for x in above:
        exponent = M.sub(x.exponent, shift)
        if x.keys and any(n.op == "read" and is_maximum(n.value) for n in E.walk(exponent)):
            is_number = any(exponent is E.ZERO and rest is E.ONE for (exponent, rest), _ in extra)
            return Refusal(ADDED if is_number else NOT_RESCALED.format(count))
        counted = below[exponent, x.weights]
        if counted / scale <= 0:
            return Refusal(NOT_ALIKE.format(count))
        counts = M.add(exponent, E.const(math.log(counted / scale))) if counted != scale else exponent
        pieces.append(_piece(x, counts, x.number / counted * math.exp(shift.value), fresh))
    if any(rest is not E.ONE for (_, rest), _ in extra):
        return _mismatch(above, below, count)
    sinks = [M.mul(E.const(number / scale), M.exp(exponent)) for (exponent, _), number in extra]
    return Separated(pieces, sinks)


def _piece(x: "_Term", exponent: Expr, number: float, fresh: Callable[[Expr], Expr]) -> Piece:
    names = {key: fresh(key.args[0]) for key in x.keys}
    weighted = M.mul(WEIGHT, x.rest) if number == 1 else M.mul(E.const(number), WEIGHT, x.rest)
    return Piece(tuple(names.values()), *Piece(x.keys, M.add(x.moving, exponent), weighted).at(names))


def is_maximum(node: fx.Node) -> bool:
    """Whether a node is a maximum, of elements of a tensor or of two tensors."""
    source = node.args[0] if is_part(node) else node
    return str(source.target).startswith(("aten.max", "aten.amax."))  # type: ignore[union-attr]


@dataclasses.dataclass(frozen=True)
class _Term:
    """number * exp(exponent) * sum over keys of exp(moving) * rest; `weights` is the sum without rest."""

    number: float
    exponent: Expr
    keys: tuple[Expr, ...]
    moving: Expr
    rest: Expr
    weights: Expr


def _opened_terms(terms: Mapping[Term, float]) -> list[_Term]:
    """Those of the terms that have such a form."""
    return [x for term, number in terms.items() if (x := _open(term, number)) is not None]


def _open(term: Term, number: float) -> _Term | None:
    exponent, rest = term
    outer = list(E.parts(rest, "mul"))
    sums = [f for f in outer if f.op == "sum" and any(n.op == "exp" for n in E.walk(f))]
    if not sums:
        return _Term(number, exponent, (), E.ZERO, rest, E.ONE)
    outer.remove(sums[0])
    keys, body = open_sums(sums[0])
    weights = [f for f in E.parts(body, "mul") if f.op == "exp"]
    others = M.mul(*outer, *(f for f in E.parts(body, "mul") if f.op != "exp"))
    if len(weights) != 1 or any(n.op == "exp" and not n.free.isdisjoint(keys) for n in E.walk(others)):
        return None
    whole = M.canonical_binders(M.totals(reversed(keys), weights[0]))
    return _Term(number, exponent, keys, weights[0].args[0], others, whole)


def _shift(above: Sequence[_Term], below: Sum) -> Expr | None:
    """The exponent by which every term above exceeds its partner below; None where there is none."""
    first = above[0]
    for exponent, rest in below:
        if rest is first.weights:
            # What a mask makes minus infinity above and below is no number when it is subtracted.
            shift = E.ZERO if first.exponent is exponent else M.sub(first.exponent, exponent)
            if shift.op == "const" and all((M.sub(a.exponent, shift), a.weights) in below for a in above):
                return shift
    return None


def _mismatch(above: Sequence[_Term], below: Sum, count: int) -> Refusal:
    """Why terms above and below are no pairs."""
    for other in (n.value for _, rest in below for n in E.parts(rest, "mul") if n.op == "read"):
        return Refusal(CHANGED.format(op_name(other), source_of(other)))
    counted = frozenset().union(*(exponent.free | rest.free for exponent, rest in below))
    if any(not (x.moving.free | x.exponent.free) - set(x.keys) <= counted for x in above):
        return Refusal(VALUES_ARE_EXPONENTIALS.format(count))
    have, want = {a.weights for a in above}, {rest for _, rest in below}
    if have == want and len(above) == len(below):
        return Refusal(NOT_ALIKE.format(count))
    return Refusal(NO_WEIGHTS if have - want or len(above) > len(below) else NO_VALUES)


# --- pieces that tile one tensor ---


def join(
    meaning: Meaning, pieces: Sequence[Piece], look: Callable[[Piece, Expr], Expr]
) -> list[Piece] | Refusal:
    """The pieces, with those that are consecutive stretches of one tensor's keys joined."""
    opened = [_opened(meaning, piece, look) for piece in pieces]
    placed = _placed(meaning, opened)
    if placed is None:
        return list(pieces) if all(p.keys for p in pieces) else Refusal(ONE_BY_ONE)
    known = sorted((p.start.value, p.length.value) for p in placed if p.start.op == p.length.op == "const")
    if any(start + length > other for (start, length), (other, _) in itertools.pairwise(known)):
        return Refusal(OVERLAP.format(len(pieces)))
    waiting, found = list(placed), []
    for template in _templates(placed):
        alike = [p for p in waiting if template.moved(p.at) == (p.piece.score, p.piece.weighted)]
        runs = _runs(alike) if len(alike) > 1 else []
        if runs:
            waiting = [p for p in waiting if p not in alike]
        for start, length in runs:
            key = meaning.fresh(length)
            found.append(Piece((key,), *template.moved(M.add(key, start))))
        if not waiting:
            break
    rest = [piece for piece, p in zip(pieces, placed, strict=True) if p in waiting]
    return [*found, *rest] if all(p.keys for p in rest) else Refusal(ONE_BY_ONE)


def cover(
    meaning: Meaning, whole: Sequence[Piece], parts: Sequence[Piece], look: Callable[[Piece, Expr], Expr]
) -> bool:
    """Whether the parts are the keys of the whole, each of them once: one after the other they have its
    scores."""
    if len(whole) != 1 or len(whole[0].keys) != 1:
        return False
    piece, end = _opened(meaning, whole[0], look), E.ZERO

    def follows(part: Piece) -> bool:
        return piece.moved(M.add(end, *part.keys))[0] is part.score

    waiting = [_opened(meaning, p, look) for p in parts]
    while waiting:
        part = next(filter(follows, waiting), None)
        if part is None:
            return False
        waiting.remove(part)
        end = M.add(end, *(key.args[0] for key in part.keys) if part.keys else (E.ONE,))
    return end is piece.keys[0].args[0]


def _opened(meaning: Meaning, piece: Piece, look: Callable[[Piece, Expr], Expr]) -> Piece:
    """The piece in terms of tensors that are no slices: its products written out over their operands."""

    def moves(read: Expr) -> bool:
        is_product = str(read.value.target) == "aten.mul.Tensor"
        return is_product or meaning.category(read.value) is Category.MOVEMENT

    def write_out(read: Expr) -> Expr:
        if meaning.category(read.value) not in (Category.CONTRACTION, Category.REDUCTION):
            return read
        whole = tried(meaning.element, read.value, read.args)
        if whole is None or not any(n.op == "sum" for n in E.walk(whole)):
            return read
        return meaning.lift(whole, moves)

    score = look(piece, piece.score)
    reads = {n: write_out(n) for n in E.reads(score) if isinstance(n.value, fx.Node)}
    score = M.canonical_binders(meaning.moved_from(M.substitute(score, reads)))
    return Piece(piece.keys, score, meaning.moved_from(piece.weighted))


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A piece whose values are elements `start` to `start + length` of an axis of a tensor."""

    piece: Piece
    start: Expr
    length: Expr
    extent: Expr

    @property
    def at(self) -> Expr:
        return M.add(self.start, *self.piece.keys)


def _placed(meaning: Meaning, pieces: Sequence[Piece]) -> list[_Placed] | None:
    """The place of every piece; None where the values are not slices of one tensor along one axis."""
    reads = [v for v in map(_value, pieces) if v is not None]
    if len(reads) < len(pieces) or any(len(p.keys) > 1 for p in pieces) or len({r.value for r in reads}) > 1:
        return None
    places = [(p, d, i) for p, r in zip(pieces, reads, strict=True) for d, i in enumerate(r.args)]
    varied = {d for p, d, i in places if i is not reads[0].args[d] or i.free & {*p.keys}}
    if len(varied) != 1:
        return None
    (axis,) = varied
    extent, found = meaning.shape(reads[0].value)[axis], []
    for piece, read in zip(pieces, reads, strict=True):
        start = M.sub(read.args[axis], M.add(*piece.keys))
        length = piece.keys[0].args[0] if piece.keys else E.ONE
        found.append(_Placed(piece, start, length, extent))
    return None if any(p.start.free for p in found) else found


def _value(piece: Piece) -> Expr | None:
    """The tensor's element that a piece weighs."""
    reads = [f for f in E.parts(piece.weighted, "mul") if f.op == "read"]
    own = [r for r in reads if not piece.keys or not r.free.isdisjoint(piece.keys)]
    main = [r for r in own if r.free - piece.score.free] or own
    return main[-1] if main else None


def _templates(placed: Sequence[_Placed]) -> Iterator[Piece]:
    """Formulas that may cover several pieces, in terms of the key's index in the tensor of values: distinct
    ones first from blocks, then from pairs of keys."""
    place = E.var("place", placed[0].extent)
    seen: set[tuple[Expr, Expr]] = set()
    for p in (p for p in placed if p.piece.keys):
        forms = p.piece.at({p.piece.keys[0]: M.sub(place, p.start)})
        if forms not in seen:
            seen.add(forms)
            yield Piece((place,), *forms)
    single = [p for p in placed if not p.piece.keys and p.start.op == "const"]
    single.sort(key=lambda p: p.start.value)
    middle = len(single) // 2
    for a, b in [single[middle - 1 : middle + 1], single[-2:], single[:2]] if len(single) > 1 else []:
        generalised = functools.partial(_generalised, at_a=a.start.value, at_b=b.start.value, place=place)
        score = generalised(_with_bounds(a.piece.score), _with_bounds(b.piece.score))
        weighted = generalised(_with_bounds(a.piece.weighted), _with_bounds(b.piece.weighted))
        if score is not None and weighted is not None:
            yield Piece((place,), score, weighted)


def _runs(placed: Sequence[_Placed]) -> list[tuple[Expr, Expr]]:
    """Stretches of consecutive pieces, as (start, length); none where a key may be in two of them."""
    ends = {M.add(p.start, p.length) for p in placed}
    by_start = {p.start: p for p in placed}
    if len(by_start) < len(placed) or len(ends) < len(placed):
        return []
    runs = []
    for first in (p for p in placed if p.start not in ends):
        end = first.start
        while end in by_start:
            end = M.add(end, by_start[end].length)
        runs.append((first.start, M.sub(end, first.start)))
    return runs


def _with_bounds(node: Expr) -> Expr:
    """A formula in which the first or last of a range is written as a bound: `q == 0` as `not 1 <= q`."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "eq":
            for number, place in (args, args[::-1]):
                if number.op == "const" and place.op == "var" and place.args:
                    if number.value == 0:
                        return E.make("not", (E.make("le", (E.ONE, place), None, "bool"),), None, "bool")
                    if M.add(number, E.ONE) is place.args[0]:
                        return E.make("le", (number, place), None, "bool")
        if current.op == "where" and args[0].op == "not":
            args = (args[0].args[0], args[2], args[1])
        return E.with_args(current, args)

    return E.rebuild(node, replace)


def _generalised(a: Expr, b: Expr, at_a: int, at_b: int, place: Expr) -> Expr | None:
    """One formula of `place` that is `a` at one number and `b` at another: where they have different numbers,
    a number that grows with the place. It is a guess, to be compared with further pieces."""
    if a is b:
        return a
    if a.op == b.op == "const" and a.kind == b.kind != "bool" and E.NAN not in (a, b):
        slope = (b.value - a.value) / (at_b - at_a)
        step = E.const(int(slope) if a.kind == "int" and slope.is_integer() else slope)
        start = a.value - step.value * at_a
        return M.add(E.const(start), M.mul(step, place))
    if (a.op, a.value, a.kind, len(a.args)) != (b.op, b.value, b.kind, len(b.args)) or not a.args:
        return None
    sides = [list(x.args) for x in (a, b)]
    if a.op in ("add", "mul", "and", "or"):
        sides = [sorted(side, key=_form) for side in sides]
    args = [_generalised(x, y, at_a, at_b, place) for x, y in zip(*sides, strict=True)]
    return M.construct(a, tuple(x for x in args if x is not None)) if None not in args else None


def _form(node: Expr) -> str:
    """The structure of a formula without its numbers."""
    value = "" if node.op == "const" else str(node.value)
    return f"{node.op} {value} ({', '.join(map(_form, node.args))})"
