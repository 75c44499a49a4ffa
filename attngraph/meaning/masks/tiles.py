"""What never has to be computed: whether a predicate holds everywhere, nowhere or somewhere in a tile.

By interval arithmetic over the program's expressions (`meaning/algebra/intervals.py`), for a whole grid of
tiles at once. Sound: "empty" and "full" are proved; whatever is unknown is partial. A kernel asks for the
`block_map` of a call: which tiles it may leave out, and where it need not evaluate the masks.

Where ranks divide the tokens, the bounds of one row of tiles for each chunk of queries and one column for
each key say which keys have to be sent: a window sends exactly its tokens. A mask that reads tensors (numbers
of documents) is bounded by what they hold in the call.
"""

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.ir.language import E, Expr, Keep, ScoreProgram, parse
from attngraph.ir.ops.token_collectives import NEEDED, Layout
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M
from attngraph.meaning.masks.fold import any_fill, low_fill, seen

from attngraph.meaning.algebra.intervals import (  # isort: skip
    EVERYTHING, Bounds, Box, Cut, Grid, Interval, bit, bounds, interval,
)  # fmt: skip

__all__ = [
    "EVALUATE", "EVERYTHING", "OPEN", "SKIP", "Box", "Cut", "Grid", "Interval", "Run", "block_map",
    "interval", "map_anew", "reads_data", "runs",
]  # fmt: skip

SKIP, EVALUATE, OPEN = 0, 1, 2
"""A tile of a block map: no key of it has weight; masks must be evaluated; every mask keeps everything."""


@functools.lru_cache(maxsize=1024)
def reads_data(program: ScoreProgram) -> bool:
    """Whether a mask of the program reads a tensor, so that its tiles differ from call to call."""
    return any(n.op == "read" for keep in program.keeps for n in E.walk(keep.predicate))


def block_map(program: ScoreProgram, grid: Grid, soft: bool = False) -> Tensor:
    """What has to be done in each block of a grid.

    Args:
        grid: without the tensors that the program reads, what is read is unknown.
        soft: also skip keys that a finite fill hides (the caller must show that the fill hides them:
            `score_bounds.hidden_below`).

    Returns:
        `[blocks of b or 1, of h or 1, of q, of k]`, uint8: SKIP, EVALUATE or OPEN. Do not write to it:
        where it follows from shapes and sizes alone it is kept for the next call.
    """
    return map_anew(program, grid, soft) if grid.reads else _kept_map(program, grid, soft)


def map_anew(program: ScoreProgram, grid: Grid, soft: bool = False) -> Tensor:
    """`block_map`, computed now whether or not it is kept."""
    hidden, full = _tile_states(program, grid, soft)
    is_open = functools.reduce(torch.logical_and, full.values(), torch.tensor(True))
    found = torch.where(hidden, SKIP, torch.where(is_open, OPEN, EVALUATE)).to(torch.uint8)
    found = found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))
    return found.expand(-1, -1, *grid.shape[2:]).contiguous()


_kept_map = functools.lru_cache(maxsize=256)(map_anew)


@dataclasses.dataclass(frozen=True)
class Run:
    """Keys [start, stop) that one block of queries looks at; `skip` are the statements of the
    program that change nothing there."""

    start: int
    stop: int
    skip: frozenset[int]


def runs(program: ScoreProgram, grid: Grid, soft: bool = False) -> tuple[tuple[Run, ...], ...]:
    """For each block of queries the runs of keys that it must look at; neighbouring blocks in which the same
    masks keep everything are one run. Keys that a mask of minus infinity hides are left out; with `soft` also
    those that a finite fill hides (as in `block_map`). The grid must have one block of b and one of h."""
    return _runs(program, grid, soft) if grid.reads else _kept_runs(program, grid, soft)


def _runs(program: ScoreProgram, grid: Grid, soft: bool) -> tuple[tuple[Run, ...], ...]:
    assert grid.shape[:2] == (1, 1), f"runs of a grid of {grid.shape} blocks"
    hidden, full = _tile_states(program, grid, soft)
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


def _tile_states(program: ScoreProgram, grid: Grid, soft: bool) -> tuple[Tensor, dict[int, Tensor]]:
    """Where no pair of a tile has any weight; and for each mask, by its place, where it keeps everything."""
    known: dict[Expr, Bounds] = {}
    masks = {n: s.predicate for n, s in enumerate(program.statements) if isinstance(s, Keep)}
    full = {n: bit(bounds(predicate, grid, {}, known))[0] >= 1 for n, predicate in masks.items()}
    return bit(bounds(seen(program.statements, any_fill if soft else None), grid, {}, known))[1] <= 0, full


_CELLS = 1 << 22
"""Pairs of a chunk and a key that are looked at; of longer sequences keys are taken in blocks."""


def visible_keys(program: ScoreProgram) -> tuple[ScoreProgram, tuple[int, ...]]:
    """A program of one mask, which keeps all that the queries of a program may see, where keys and queries
    are the same tokens; and which of the tensors it reads.

    A finite fill hides a key only where the query sees another one. So such masks count where every query is
    shown to see itself.
    """
    found = seen(program.statements, low_fill)
    if not sees_itself(found):
        found = seen(program.statements)
    # Batch and head may only choose entries of tensors, whose extents then tell how many there are.
    numbers = {E.var("b"), E.var("h")}
    others = reached([found], lambda n: [a for a in n.args if n.op != "read" or a not in numbers])
    if found is E.TRUE or not numbers.isdisjoint(others):
        return ScoreProgram(()), ()
    return ScoreProgram((Keep(found),)).renumbered()


def sees_itself(predicate: Expr) -> bool:
    """Whether a predicate is shown to keep the key at the query's own place."""
    return M.substitute(M.canonical(predicate), {E.var("k"): E.var("q")}) is E.TRUE


def needed_by_ranks(
    program: str, reads: Sequence[Tensor], sizes: tuple[int, ...], layout: Layout, total: int
) -> Tensor:
    """Booleans `[ranks, keys]`: which keys the queries of each rank may see by a program's masks."""
    parsed = parse(program)
    chunk = total // layout.count
    b, h = (_extent(parsed, reads, name) for name in ("b", "h"))
    step = 1
    while b * h * layout.count * (total // step) > _CELLS:
        step *= 2
    given = tuple(r.detach().cpu() for r in reads) if parsed.reads else ()
    grid = Grid(Cut(0, b, 1), Cut(0, h, 1), Cut(0, total, chunk), Cut(0, total, step), sizes, given)
    by_chunk = (block_map(parsed, grid) != SKIP).any(0).any(0)  # [chunks, blocks of keys]
    by_rank = by_chunk[torch.tensor(layout.chunks, device="cpu")].any(1)
    return by_rank.repeat_interleave(step, 1)[:, :total]


def _extent(program: ScoreProgram, reads: Sequence[Tensor], name: str) -> int:
    """How many entries tensors have for a batch or a head; 1 where none is read by it."""
    extents = [
        reads[read.value].shape[axis]
        for read, axis, index in program.places
        if index.op == "var" and index.value == name and read.value < len(reads)
    ]
    return max(extents, default=1)


def pairs_of_ranks(program: ScoreProgram, sizes: tuple[int, ...], layout: Layout, total: int) -> list[float]:
    """About how many pairs of a query and a key each rank computes; what tensors decide counts as seen."""
    parsed, _ = visible_keys(program)
    step = max(total // layout.count // 8, 1)
    while total // layout.count % step:
        step -= 1
    cut = Cut(0, total, step)
    cells = block_map(parsed, Grid(Cut(0, 1, 1), Cut(0, 1, 1), cut, cut, sizes)) != SKIP
    chunks = cells[0, 0].sum(1).view(layout.count, -1).sum(1)
    found: list[float] = chunks[torch.tensor(layout.chunks, device="cpu")].sum(1).double().tolist()
    return found


NEEDED[:] = [needed_by_ranks]
