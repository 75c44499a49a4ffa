"""Queries that see no key, whatever the tensors hold: the sign of a mask that was inverted.

Decided by evaluating the masks of a program at the sizes of one call. A fill that is finite counts as hiding:
such a row is the average over all keys, which nobody means by a mask. Masks that tensors decide count as
seeing. In calls with very many pairs only the first and the last query are looked at: an inverted causal mask
hides all keys from one of these. For the report alone: nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngraph.ir import budgets
from attngraph.ir.language import expr as E
from attngraph.ir.language.evaluate import Environment, Tile
from attngraph.ir.language.score import ScoreProgram
from attngraph.meaning.masks.visible import KEPT, visible


def warn_of_blind_rows(program: ScoreProgram, shape: tuple[int, int, int, int], sizes: Sequence[int]) -> str:
    """What to tell of queries that see no key in a call with so many batches, heads, queries and keys; "" if
    there is nothing to tell."""
    if not program.keeps or 0 in shape:
        return ""
    named = {n.value for keep in program.keeps for n in E.walk(keep.predicate) if n.op == "var"}
    b, h, q, k = (n if name in named or name == "k" else 1 for name, n in zip("bhqk", shape, strict=True))
    rows = [range(q)]
    if b * h * q * k > budgets.PAIRS_LOOKED_AT:
        rows = [range(1), range(q - 1, q)]
    if b * h * len(rows[0]) * k > budgets.PAIRS_LOOKED_AT:
        return ""
    blind: list[int] = []
    for some in rows:
        tile = Tile((0, b), (0, h), (some.start, some.stop), (0, k))
        env = Environment(tile, (), sizes, torch.float32, torch.device("cpu"))
        seen = (visible(program, env) & KEPT > 0).any(-1).all(0).all(0)
        blind += [some[place] for place in (~seen).nonzero().flatten().tolist()]
    if not blind:
        return ""
    if q == 1 < shape[2]:
        return "no query sees a key: is the mask inverted?"
    if len(rows) > 1:
        return f"query {blind[0]} of {q} sees no key: is the mask inverted?"
    return f"{len(blind)} of {q} queries see no key (query {blind[0]} is the first): is the mask inverted?"
