"""Queries that see no key, whatever the tensors hold: the sign of a mask that was inverted.

Decided by evaluating the masks of a program at the sizes of one call. Masks that tensors decide count as
seeing; calls with very many pairs are not looked at. For the report alone: nothing depends on it.
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
    if not program.keeps:
        return ""
    named = {n.value for keep in program.keeps for n in E.walk(keep.predicate) if n.op == "var"}
    extents = [n if name in named or name == "k" else 1 for name, n in zip("bhqk", shape, strict=True)]
    b, h, q, k = extents
    if b * h * q * k > budgets.PAIRS_LOOKED_AT or not k:
        return ""
    tile = Tile((0, b), (0, h), (0, q), (0, k))
    env = Environment(tile, (), sizes, torch.float32, torch.device("cpu"))
    seen = (visible(program, env) & KEPT > 0).any(-1).all(0).all(0)
    blind = (~seen).nonzero().flatten().tolist()
    if not blind:
        return ""
    if q == 1 < shape[2]:
        return "no query sees a key: is the mask inverted?"
    return f"{len(blind)} of {q} queries see no key (query {blind[0]} is the first): is the mask inverted?"
