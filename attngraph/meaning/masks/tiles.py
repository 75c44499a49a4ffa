"""What never has to be computed: whether a predicate holds everywhere, nowhere or somewhere in a tile.

By interval arithmetic over the program's expressions (`meaning/algebra/intervals.py`), for a whole grid of
tiles at once. Sound: "empty" and "full" are proved; whatever is unknown is partial. A kernel asks for the
`block_map` of a call: which tiles it may leave out, and where it need not evaluate the masks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math

import torch
from torch import Tensor

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import SCORE, WEIGHT, Keep, Score, ScoreProgram, Weight
from attngraph.meaning.algebra.intervals import (
    EVERYTHING,
    Bounds,
    Box,
    Cut,
    Grid,
    Interval,
    bit,
    bounds,
    interval,
)

__all__ = [
    "EVALUATE", "EVERYTHING", "OPEN", "SKIP", "Box", "Cut", "Fill", "Grid", "Interval", "Run", "block_map",
    "classify", "hidden_below", "interval", "keeps_minus_infinity", "reads_data", "runs",
]  # fmt: skip

SKIP, EVALUATE, OPEN = 0, 1, 2
"""A tile of a block map: no key of it has weight; masks must be evaluated; every mask keeps everything."""


class Fill(enum.Enum):
    """How much of a tile a predicate keeps."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


def classify(predicate: Expr, box: Box) -> Fill:
    """Whether the predicate is false, true or undecided on the box."""
    low, high = bit(bounds(predicate, box, {}))
    return Fill.FULL if bool(low >= 1) else Fill.EMPTY if bool(high <= 0) else Fill.PARTIAL


def reads_data(program: ScoreProgram) -> bool:
    """Whether a mask of the program reads a tensor, so that its tiles differ from call to call."""
    return any(n.op == "read" for keep in program.keeps for n in E.walk(keep.predicate))


def block_map(program: ScoreProgram, grid: Grid, soft: bool = False) -> Tensor:
    """What has to be done in each block of a grid.

    Args:
        grid: without the tensors that the program reads, what is read is unknown.
        soft: also skip keys that a finite fill hides (the caller must show that the fill hides them:
            `hidden_below`).

    Returns:
        `[blocks of b or 1, of h or 1, of q, of k]`, uint8: SKIP, EVALUATE or OPEN. Do not write to it:
        where it follows from shapes and sizes alone it is kept for the next call.
    """
    return _map(program, grid, soft) if grid.reads else _kept_map(program, grid, soft)


def _map(program: ScoreProgram, grid: Grid, soft: bool) -> Tensor:
    hidden, full = _fates(program, grid, soft)
    is_open = functools.reduce(torch.logical_and, full.values(), torch.tensor(True))
    found = torch.where(hidden, SKIP, torch.where(is_open, OPEN, EVALUATE)).to(torch.uint8)
    found = found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))
    return found.expand(-1, -1, *grid.shape[2:]).contiguous()


_kept_map = functools.lru_cache(maxsize=256)(_map)


@dataclasses.dataclass(frozen=True)
class Run:
    """Keys [start, stop) that one block of queries looks at; `skip` are the statements of the
    program that change nothing there."""

    start: int
    stop: int
    skip: frozenset[int]


def runs(program: ScoreProgram, grid: Grid, soft: bool = False) -> tuple[tuple[Run, ...], ...]:
    """For each block of queries the runs of keys that it must look at, neighbouring blocks with the same
    fate joined. Keys that a mask of minus infinity empties are left out; with `soft` also those that a
    finite fill hides (as in `block_map`). The grid must have one block of b and one of h."""
    return _runs(program, grid, soft) if grid.reads else _kept_runs(program, grid, soft)


def _runs(program: ScoreProgram, grid: Grid, soft: bool) -> tuple[tuple[Run, ...], ...]:
    assert grid.shape[:2] == (1, 1), f"runs of a grid of {grid.shape} blocks"
    hidden, full = _fates(program, grid, soft)
    table = torch.stack([t.expand(grid.shape)[0, 0] for t in (hidden, *full.values())], -1)
    return tuple(_joined(row, tuple(full), grid) for row in table.tolist())


_kept_runs = functools.lru_cache(maxsize=256)(_runs)


def _joined(row: list[list[bool]], places: tuple[int, ...], grid: Grid) -> tuple[Run, ...]:
    found: list[Run] = []
    for number, (is_hidden, *are_full) in enumerate(row):
        start = grid.k.start + number * grid.k.step
        stop = min(start + grid.k.step, grid.k.stop)
        skip = frozenset(p for p, is_full in zip(places, are_full, strict=True) if is_full)
        if is_hidden:
            continue
        if found and found[-1].stop == start and found[-1].skip == skip:
            found[-1] = Run(found[-1].start, stop, skip)
        else:
            found.append(Run(start, stop, skip))
    return tuple(found)


def _fates(program: ScoreProgram, grid: Grid, soft: bool) -> tuple[Tensor, dict[int, Tensor]]:
    """Where no key of a block has any weight; and for each mask, where it keeps everything."""
    full: dict[int, Tensor] = {}
    hidden = torch.tensor(False)
    known: dict[Expr, Bounds] = {}
    for place, statement in enumerate(program.statements):
        if isinstance(statement, Score):
            hidden = torch.tensor(False)  # a score computed from a masked one may be anything
            known = {n: b for n, b in known.items() if all(m is not SCORE for m in E.walk(n))}
        elif isinstance(statement, Weight):
            hidden = hidden & keeps_zero(statement.value)
        if not isinstance(statement, Keep):
            continue
        low, high = bit(bounds(statement.predicate, grid, {}, known))
        empty, full[place] = high <= 0, low >= 1
        if statement.is_hard or soft:
            hidden = hidden | empty
        elif not keeps_minus_infinity(statement.fill):
            hidden = hidden & full[place]
    return hidden, full


def keeps_minus_infinity(fill: Expr) -> bool:
    """Whether a fill leaves minus infinity what it is: `s`, or `s` plus or minus what does not undo it."""
    if fill is SCORE:
        return True
    if fill.op not in ("add", "sub"):
        return False
    a, b = fill.args
    if a is not SCORE or b.op != "const" or b.value == "nan":
        return False
    return math.isfinite(b.value) or (b.value < 0) == (fill.op == "add")


def keeps_zero(weight: Expr) -> bool:
    """Whether a weight of zero stays zero, and one that is no number is not made one: p times or over
    a number, a selection between that and zero, or zero in place of NaN."""
    if weight is WEIGHT or E.is_const(weight, 0):
        return True
    if weight.op in ("mul", "div"):
        a, b = weight.args
        number, other = (a, b) if a.op == "const" and weight.op == "mul" else (b, a)
        usable = number.op == "const" and number.value != "nan" and math.isfinite(number.value)
        return usable and number.value != 0 and keeps_zero(other)
    if weight.op == "where":
        return all(keeps_zero(branch) for branch in weight.args[1:])
    return False


def hidden_below(program: ScoreProgram, dot: float, sizes: tuple[int, ...]) -> float:
    """A number that no score hidden by a finite fill exceeds, where |dot| <= `dot`. Infinite where
    nothing can be said."""
    if not math.isfinite(dot):
        return math.inf
    # Quarters of powers of two, so that calls share what is found.
    return _hidden_below(program, 2.0 ** (math.ceil(4 * math.log2(max(dot, 1e-30))) / 4), sizes)


@functools.lru_cache(maxsize=1 << 12)
def _hidden_below(program: ScoreProgram, dot: float, sizes: tuple[int, ...]) -> float:
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
            if statement.is_hard or statement.lowers:
                # Fills below must not turn minus infinity into something else.
                later = program.statements[program.statements.index(statement) + 1 :]
                fills = [s.fill for s in later if isinstance(s, Keep) and not s.is_hard]
                if any(any(n is SCORE for n in E.walk(f)) and not keeps_minus_infinity(f) for f in fills):
                    return math.inf
                continue
            low, high = interval(statement.fill, everywhere, names)
            bound = max(bound, high)
            score = (min(score[0], low), max(score[1], high))
    return bound
