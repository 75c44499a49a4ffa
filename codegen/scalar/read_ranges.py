"""Whether what a program reads lies inside its tensors: found before a kernel runs, which cannot raise.

An index out of range is an error, also where the value that is read is not used (`ir/language/evaluate.py`).
An index that follows from positions and sizes is bounded by interval arithmetic, block by block, and
evaluated in the blocks where that does not decide; once for each combination of sizes. An index that follows
from data is not known here (`follows_from_data`).
"""

import functools

import torch

from attngraph.ir.language import E, Environment, Expr, Tile, evaluate
from attngraph.ir.language.score import INDICES, ScoreProgram
from attngraph.ir.ops.kernels import Operands, Reads, Sizes, accumulation_dtype
from attngraph.meaning.algebra.intervals import Box, Cut, Grid, bounds, interval

_BLOCKS = 256
"""Into about how many blocks an axis is divided at most."""
_STEP = 64
"""Positions of a block, at least."""
Extents = tuple[int, int, int, int]


def require_in_range(program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> None:
    """Raise IndexError where an index that follows from positions and sizes is out of range."""
    q, k, _ = operands
    problem = _problem_of(program, (*q.shape[:3], k.shape[2]), reads, sizes, accumulation_dtype(q.dtype))
    if problem is not None:
        raise IndexError(problem)


def are_in_range(
    program: ScoreProgram, extents: Extents, reads: Reads, sizes: Sizes, dtype: torch.dtype
) -> bool:
    """Whether all indices of positions are in range, for rows that grow from step to step: those that are
    computed are looked at up to the next power of two, and if that is too far, as far as `extents` say."""
    far = dict(zip(INDICES, extents, strict=True))
    plain = ((node.value, axis, index.value) for node, axis, index in program.places if index.op == "var")
    if any(reads[number].shape[axis] < far[name] for number, axis, name in plain):
        return False
    (b, h, *ends) = extents
    ahead: Extents = (b, h, *(1 << (n - 1).bit_length() for n in ends))  # type: ignore[assignment]
    return any(_problem_of(program, found, reads, sizes, dtype) is None for found in (ahead, extents))


@functools.lru_cache(maxsize=1024)
def reads_by_data(program: ScoreProgram) -> frozenset[int]:
    """The numbers of the tensors that are read at an index that follows from data."""
    return frozenset(node.value for node, _, index in program.places if follows_from_data(index))


def _problem_of(
    program: ScoreProgram, extents: Extents, reads: Reads, sizes: Sizes, dtype: torch.dtype
) -> str | None:
    if not _computed(program):
        return None
    shapes = tuple((number, tuple(reads[number].shape)) for number in program.reads)
    return _problem(program, extents, shapes, tuple(sizes[: program.sizes]), dtype)


@functools.lru_cache(maxsize=1024)
def follows_from_data(index: Expr) -> bool:
    """Whether an index depends on what is read, on scores or on drawn numbers."""
    return any(n.op in ("read", "dot", "s", "p", "random") for n in E.walk(index))


@functools.lru_cache(maxsize=1024)
def _computed(program: ScoreProgram) -> tuple[tuple[Expr, int], ...]:
    """The reads, and their axes, whose index is a formula of positions and sizes."""
    return tuple(
        (node, axis)
        for node, axis, index in program.places
        if index.op not in ("var", "const") and not follows_from_data(index)
    )


@functools.lru_cache(maxsize=1024)
def _problem(
    program: ScoreProgram, extents: Extents, shapes: tuple[tuple[int, tuple[int, ...]], ...],
    sizes: tuple[int, ...], dtype: torch.dtype,
) -> str | None:  # fmt: skip
    """What is out of range, or None."""
    shape_of = dict(shapes)
    for node, axis in _computed(program) if min(extents) else ():
        extent = shape_of[node.value][axis]
        low, high = _range(node.args[axis], extent, extents, sizes, dtype)
        if low < 0 or high >= extent:
            return (
                f"{E.format_expr(node)} reads place {low if low < 0 else high} of a dimension of {extent}; "
                "an index must be in range, also where its value is not used."
            )
    return None


def _range(
    index: Expr, extent: int, extents: Extents, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[int, int]:
    """The least and the largest value of an index, or any two in range if all are."""
    b, h, q, k = ((0.0, stop - 1.0) for stop in extents)
    low, high = interval(index, Box(b, h, q, k, sizes), {})
    if low >= 0 and high < extent:
        return int(low), int(high)
    names = {n.value for n in index.free}
    stops = [stop if name in names else 1 for name, stop in zip(INDICES, extents, strict=True)]
    cuts = [Cut(0, stop, max(_STEP, -(-stop // _BLOCKS))) for stop in stops]
    least, most = 0, 0
    grid = Grid(cuts[0], cuts[1], cuts[2], cuts[3], sizes)
    found = bounds(index, grid, {})
    doubtful = ~((found.low >= 0) & (found.high < extent))
    for place in doubtful.expand(grid.shape).nonzero().tolist():
        tile = [(n * cut.step, min((n + 1) * cut.step, cut.stop)) for n, cut in zip(place, cuts, strict=True)]
        env = Environment(Tile(*tile), (), sizes, dtype, torch.device("cpu"))
        value = evaluate.evaluate(index, env, {})
        low, high = map(int, torch.as_tensor(value).aminmax())
        least, most = min(least, low), max(most, high)
    return least, most
