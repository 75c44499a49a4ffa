"""Which keys the queries of each rank may see: what has to be sent where ranks divide the tokens.

The bounds of `tiles.py`, one row of tiles for each chunk of queries and one column for each key, so that a
window sends exactly its tokens. A mask that reads tensors (numbers of documents) is bounded by what they hold
in the call. What is not shown to be hidden is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.ir.language import E, Expr, Keep, ScoreProgram, parse
from attngraph.ir.ops.token_collectives import NEEDED, Layout
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M
from attngraph.meaning.masks.fold import low_fill, seen
from attngraph.meaning.masks.tiles import SKIP, Cut, Grid, block_map

_CELLS = 1 << 22
"""Pairs of a chunk and a key that are looked at; of longer sequences keys are taken in blocks."""


def visible_keys(program: ScoreProgram) -> tuple[ScoreProgram, tuple[int, ...]]:
    """A program of one mask, which keeps all that the queries of a program may see, where keys and queries
    are the same tokens; and which of the tensors it reads.

    A finite fill hides a key only where the query sees another one. So such masks count where every query is
    shown to see itself.
    """
    q, k = E.var("q"), E.var("k")
    found = seen(program.statements, low_fill)
    if M.substitute(M.canonical(found), {k: q}) is not E.TRUE:
        found = seen(program.statements)
    if found is E.TRUE or not _is_bounded_in_heads(found):
        return ScoreProgram(()), ()
    used = tuple(sorted({int(n.value) for n in E.reads(found)}))
    return ScoreProgram((Keep(_renumbered(found, used)),)), used


def _renumbered(predicate: Expr, used: tuple[int, ...]) -> Expr:
    """The predicate with the tensors that it reads numbered from 0."""

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        return (
            E.read(used.index(node.value), args, node.kind) if node.op == "read" else E.with_args(node, args)
        )

    return E.rebuild(predicate, leaf)


def _is_bounded_in_heads(predicate: Expr) -> bool:
    """Whether batch and head only choose entries of tensors, whose extents then tell how many there are."""
    numbers = {E.var("b"), E.var("h")}
    inside = {n for r in E.walk(predicate) if r.op == "read" for n in r.args if n in numbers}
    others = reached([predicate], lambda n: [a for a in n.args if n.op != "read" or a not in inside])
    return numbers.isdisjoint(others)


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
