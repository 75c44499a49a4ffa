"""What never has to be computed: whether a predicate holds everywhere, nowhere or somewhere in a tile.

Interval arithmetic over the program's expressions. Sound: "empty" and "full" are proved; anything
unknown, above all what is read from tensors, is partial.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping

from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.ir.score import SCORE, WEIGHT, Keep, Score, ScoreProgram, Weight

Interval = tuple[float, float]
EVERYTHING: Interval = (-math.inf, math.inf)


class Fill(enum.Enum):
    """How much of a tile a predicate keeps."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


@dataclasses.dataclass(frozen=True)
class Box:
    """Inclusive ranges of the four indices, and the sizes."""

    b: Interval
    h: Interval
    q: Interval
    k: Interval
    sizes: tuple[int, ...] = ()


def classify(predicate: Expr, box: Box) -> Fill:
    """Whether the predicate is false, true or undecided on the box."""
    low, high = _bit(interval(predicate, box, {}))
    return Fill.FULL if low >= 1 else Fill.EMPTY if high <= 0 else Fill.PARTIAL


def interval(node: Expr, box: Box, names: Mapping[str, Interval]) -> Interval:
    """Bounds of an expression on a box; booleans are 0 or 1. `names` bounds `dot`, `s`, `p`."""
    match node.op:
        case "const":
            return EVERYTHING if node.value == "nan" else (float(node.value), float(node.value))
        case "var":
            return getattr(box, node.value)  # type: ignore[no-any-return]
        case "size":
            value = float(box.sizes[int(node.value[1:])])
            return value, value
        case "dot" | "s" | "p":
            return names.get(node.op, EVERYTHING)
        case "read":
            return EVERYTHING
    args = [interval(a, box, names) for a in node.args]
    rule = _RULES.get(node.op)
    unbounded = any(math.isinf(x) for a in args for x in a)
    if rule is None or (unbounded and node.op not in _LOGIC):
        # What is unbounded may also be NaN, of which nothing can be said.
        return _truth() if node.kind == "bool" else EVERYTHING
    if node.op == "mod":
        return _mod(args[0], args[1], all(a.kind == "int" for a in node.args))
    return rule(*args)


_LOGIC = frozenset({"and", "or", "not", "where"})


def _truth(low: bool = False, high: bool = True) -> Interval:
    return float(low), float(high)


def _product(a: Interval, b: Interval) -> Interval:
    corners = [0.0 if 0.0 in (x, y) else x * y for x in a for y in b]
    return min(corners), max(corners)


def _floordiv(a: Interval, b: Interval) -> Interval:
    if b[0] != b[1] or b[0] <= 0:
        return EVERYTHING
    return a[0] // b[0], a[1] // b[0]


def _mod(a: Interval, b: Interval, integers: bool = False) -> Interval:
    if b[0] != b[1] or b[0] <= 0:
        return EVERYTHING
    if integers and a[0] // b[0] == a[1] // b[0]:
        return a[0] % b[0], a[1] % b[0]
    return 0.0, b[0] - 1 if integers else b[0]


def _abs(a: Interval) -> Interval:
    low = 0.0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return low, max(abs(a[0]), abs(a[1]))


def _where(condition: Interval, a: Interval, b: Interval) -> Interval:
    condition = _bit(condition)
    if condition[0] >= 1:
        return a
    if condition[1] <= 0:
        return b
    return min(a[0], b[0]), max(a[1], b[1])


def _equal(a: Interval, b: Interval) -> Interval:
    return _truth(a[0] == a[1] == b[0] == b[1], a[0] <= b[1] and b[0] <= a[1])


def _monotone(function: Callable[[float], float]) -> Callable[[Interval], Interval]:
    return lambda a: (function(a[0]), function(a[1]))


_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]),
    "mul": _product,
    "floordiv": _floordiv,
    "mod": _mod,
    "abs": _abs,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "where": _where,
    "le": lambda a, b: _truth(a[1] <= b[0], a[0] <= b[1]),
    "lt": lambda a, b: _truth(a[1] < b[0], a[0] < b[1]),
    "ge": lambda a, b: _truth(b[1] <= a[0], b[0] <= a[1]),
    "gt": lambda a, b: _truth(b[1] < a[0], b[0] < a[1]),
    "eq": _equal,
    "ne": lambda a, b: _where(_equal(a, b), (0.0, 0.0), (1.0, 1.0)),
    "and": lambda a, b: (min(_bit(a)[0], _bit(b)[0]), min(_bit(a)[1], _bit(b)[1])),
    "or": lambda a, b: (max(_bit(a)[0], _bit(b)[0]), max(_bit(a)[1], _bit(b)[1])),
    "not": lambda a: (1 - _bit(a)[1], 1 - _bit(a)[0]),
    "floor": _monotone(lambda x: x if math.isinf(x) else math.floor(x)),
    "tanh": _monotone(math.tanh),
    "random": lambda *_: (0.0, 1.0),
}  # fmt: skip


def _bit(a: Interval) -> Interval:
    """A truth value; a number counts as true unless it is zero."""
    if a[0] > 0 or a[1] < 0:
        return 1.0, 1.0
    return (0.0, 0.0) if a == (0.0, 0.0) else (0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Run:
    """Keys [start, stop) that one block of queries looks at; `skip` are the statements of the
    program that change nothing there."""

    start: int
    stop: int
    skip: frozenset[int]


@functools.lru_cache(maxsize=1 << 16)
def runs(
    program: ScoreProgram,
    b: tuple[int, int],
    h: tuple[int, int],
    q: tuple[int, int],
    keys: int,
    step: int,
    sizes: tuple[int, ...],
    soft: bool,
) -> tuple[Run, ...]:
    """The runs of keys that queries [q0, q1) must look at, in steps of `step` keys, neighbours with
    the same fate joined. Keys that a mask of minus infinity empties are left out; with `soft` also
    those that a finite fill hides (the caller must show that the fill hides them: `hidden_below`)."""
    found: list[Run] = []
    for start in range(0, keys, step):
        stop = min(start + step, keys)
        box = Box(_range(b), _range(h), _range(q), _range((start, stop)), sizes)
        skip = _fate(program, box, soft)
        if skip is None:
            continue
        if found and found[-1].stop == start and found[-1].skip == skip:
            found[-1] = Run(found[-1].start, stop, skip)
        else:
            found.append(Run(start, stop, skip))
    return tuple(found)


def _range(half_open: tuple[int, int]) -> Interval:
    return float(half_open[0]), float(half_open[1] - 1)


def _fate(program: ScoreProgram, box: Box, soft: bool) -> frozenset[int] | None:
    """The statements that change nothing on the box, or None where no key of it has any weight."""
    skip: set[int] = set()
    hidden = False
    for place, statement in enumerate(program.statements):
        if isinstance(statement, Score):
            hidden = False  # a score computed from a masked one may be anything
        elif isinstance(statement, Weight):
            hidden = hidden and _keeps_zero(statement.value)
        if not isinstance(statement, Keep):
            continue
        fill = classify(statement.predicate, box)
        if fill is Fill.FULL:
            skip.add(place)
        elif statement.is_hard:
            hidden |= fill is Fill.EMPTY
        elif fill is Fill.EMPTY and soft:
            hidden = True
        else:
            hidden = hidden and (soft or _keeps_minus_infinity(statement.fill))
    return None if hidden else frozenset(skip)


def _keeps_minus_infinity(fill: Expr) -> bool:
    """Whether a fill leaves minus infinity what it is: `s`, or `s` plus a number."""
    if fill is SCORE:
        return True
    if fill.op not in ("add", "sub"):
        return False
    a, b = fill.args
    is_number = b.op == "const" and b.value != "nan" and math.isfinite(b.value)
    return a is SCORE and is_number


def _keeps_zero(weight: Expr) -> bool:
    """Whether a weight of zero stays zero, and one that is no number is not made one: p times or over
    a number, a selection between that and zero, or zero in place of NaN."""
    if weight is WEIGHT or E.is_const(weight, 0):
        return True
    if weight.op in ("mul", "div"):
        a, b = weight.args
        number, other = (a, b) if a.op == "const" and weight.op == "mul" else (b, a)
        usable = number.op == "const" and number.value != "nan" and math.isfinite(number.value)
        return usable and number.value != 0 and _keeps_zero(other)
    if weight.op == "where":
        return all(_keeps_zero(branch) for branch in weight.args[1:])
    return False


def hidden_below(program: ScoreProgram, dot: float, sizes: tuple[int, ...]) -> float:
    """A number that no score hidden by a finite fill exceeds, where |dot| <= `dot`. Infinite where
    nothing can be said."""
    any_place = (0.0, math.inf)
    everywhere = Box(any_place, any_place, any_place, any_place, sizes)
    score: Interval = (-dot, dot)
    bound = -math.inf
    for statement in program.statements:
        names = {"dot": (-dot, dot), "s": score}
        if isinstance(statement, Score):
            if bound > -math.inf:
                return math.inf
            score = interval(statement.value, everywhere, names)
        elif isinstance(statement, Keep):
            if statement.is_hard:
                # Fills below must not turn minus infinity into something else.
                later = program.statements[program.statements.index(statement) + 1 :]
                fills = [s.fill for s in later if isinstance(s, Keep) and not s.is_hard]
                if any(any(n is SCORE for n in E.walk(f)) and not _keeps_minus_infinity(f) for f in fills):
                    return math.inf
                continue
            low, high = interval(statement.fill, everywhere, names)
            bound = max(bound, high)
            score = (min(score[0], low), max(score[1], high))
    return bound
