"""The weights of an attention, for looking at them: what fused kernels never write to memory.

    p[b, h, q, k] = exp(s - lse), then the program's `p = ...`

Computed for a block of queries at a time, so that besides the result there is at most one block of scores in
memory (`SCORES` of them, or one query's). Queries and rows of the batch can be selected; the rest costs
nothing.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from attngraph.ir.language import ScoreProgram, Tile, evaluate
from attngraph.ir.ops import kernels

SCORES = 1 << 20
"""Scores that are in memory at once."""
Places = int | slice | Sequence[int] | Tensor | None
"""A selection along one dimension: one place, a slice, some places, or all (None)."""


def attention_weights(
    program: ScoreProgram, q: Tensor, k: Tensor, reads: Sequence[Tensor], sizes: Sequence[int],
    rows: Places = None, queries: Places = None,
) -> Tensor:  # fmt: skip
    """The weights of an attention with operands as for `attngraph::attention`, `[rows, Hq, queries, Skv]` in
    the operands' dtype. `rows`: which entries of the batch; `queries`: which queries. Both keep their
    dimension, also for an int; IndexError where there is none of a number. A query that sees no key has NaN,
    as in PyTorch's softmax."""
    batch, heads, tokens, _ = q.shape
    keys = k.shape[2]
    chosen = _places(rows, batch, "row"), _places(queries, tokens, "query")
    found = q.new_empty((len(chosen[0]), heads, len(chosen[1]), keys))
    most = max(1, SCORES // max(1, heads * keys))
    for place, row in enumerate(chosen[0]):
        for start, first, count in _runs(chosen[1], most):
            span = slice(first, first + count)
            tile = Tile((row, row + 1), (0, heads), (first, first + count), (0, keys))
            own = q[row : row + 1, :, span], k[row : row + 1]
            found[place, :, start : start + count] = _block(program, *own, reads, sizes, tile)[0]
    return found


def _block(
    program: ScoreProgram, q: Tensor, k: Tensor, reads: Sequence[Tensor], sizes: Sequence[int], tile: Tile
) -> Tensor:
    """The weights of one tile, which spans all keys: as `kernels.attend` has them."""
    env = kernels.environment(tile, reads, sizes, q)
    if 0 in tile.shape:
        return q.new_empty(tile.shape, dtype=env.dtype)
    dot = kernels.dot(q.to(env.dtype), k.to(env.dtype))
    weights = kernels.normalised(evaluate.scores(program, dot, env), evaluate.sink(program, env))
    return evaluate.weights(program, weights, env, dot)


def _places(selection: Places, extent: int, what: str) -> list[int]:
    if selection is None:
        return list(range(extent))
    if isinstance(selection, slice):
        return list(range(extent))[selection]
    given = [selection] if isinstance(selection, int) else [int(n) for n in selection]
    for number in given:
        if not -extent <= number < extent:
            raise IndexError(f"there is no {what} {number}: the attention has {extent}.")
    return [number % extent for number in given]


def _runs(places: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Neighbouring places that follow each other: where a run starts, its first place, its length."""
    start = 0
    for end in range(1, len(places) + 1):
        follows = end < len(places) and places[end] == places[end - 1] + 1
        if not follows or end - start == most:
            yield start, places[start], end - start
            start = end
