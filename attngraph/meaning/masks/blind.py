"""Queries from which a mask hides every key: usually a mask that was inverted by mistake.

Only the first and the last query are examined, by the masks of positions alone and with the sizes of one
call: an inverted causal mask hides all keys from one of them. A fill that is finite counts as hiding here,
because such a row is the average over all keys, which nobody means by a mask.
"""

from __future__ import annotations

from attngraph.ir.language.score import ScoreProgram
from attngraph.meaning.masks.tiles import SKIP, Cut, Grid, block_map


def blind_query(
    program: ScoreProgram, batch: int, heads: int, queries: int, keys: int, sizes: tuple[int, ...]
) -> int | None:
    """A query that sees no key of a call of these sizes, whatever the tensors are; None if none is found."""
    if not program.keeps or not queries or not keys:
        return None
    b, h = (Cut(0, max(n, 1), max(n, 1)) for n in (batch, heads))
    for query in (0, queries - 1):
        row = Grid(b, h, Cut(query, query + 1, 1), Cut(0, keys, keys), sizes)
        if bool((block_map(program, row, soft=True) == SKIP).all()):
            return query
    return None


def warn(query: int | None) -> str:
    """What is said behind a mask in words."""
    return "" if query is None else f" (query {query} sees no key: is the mask inverted?)"
