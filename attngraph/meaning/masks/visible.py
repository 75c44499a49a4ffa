"""What a program's masks do to each pair of a query and a key: kept, hidden, filled, or not known yet.

Three-valued logic: a tensor or a score in a predicate may be unknown, and "and", "or" and "not" are then
decided as far as possible. Known formulas are evaluated (`ir/language/evaluate.py`). This is for pictures of
masks; kernels use `meaning/masks/tiles.py`, which evaluates no single pair. Only `keep` statements, and what
later statements do to the pairs that they hid, are considered; a score that becomes minus infinity in another
way counts as kept.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attngraph.ir import budgets
from attngraph.ir.language import DOT, INDICES, SCORE, E, Expr, Keep, ScoreProgram
from attngraph.ir.language.evaluate import Environment, Tile, Value, as_bool, evaluate, tensor
from attngraph.meaning.algebra.intervals import Cut, Grid, bit, bounds
from attngraph.meaning.masks.fold import Domain, fold

KEPT, HIDDEN, FILLED = 1, 2, 4
"""What can become of a pair: the score stays; it is minus infinity, so the weight is zero; it is a fill.
A sum of them stands for a pair of which more than one is possible."""


def unknown_names(nodes: Iterable[Expr], reads: int) -> tuple[str, ...]:
    """The names in expressions that only a call knows: tensors beyond the first `reads`, `dot`, `s`."""
    found = {n for node in nodes for n in E.walk(node)}
    tensors = sorted({int(n.value) for n in found if n.op == "read" and n.value >= reads})
    return (*(f"r{n}" for n in tensors), *(n.op for n in (DOT, SCORE) if n in found))


def visible(program: ScoreProgram, env: Environment) -> Tensor:
    """What can become of each pair of a tile: uint8, the tile's shape, sums of KEPT, HIDDEN and FILLED.

    Raises:
        IndexError: the program reads beyond a tensor that is given.
    """
    return fold(program.statements, _Pairs(env))


class _Pairs(Domain[tuple[Tensor, Tensor], Tensor]):
    """Every fill and score is computed for each pair, where it is known."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.shown = torch.full(env.tile.shape, KEPT, dtype=torch.uint8)

    def truth(self, predicate: Expr) -> tuple[Tensor, Tensor]:
        return _truth(predicate, self.env)

    def choose(self, kept: tuple[Tensor, Tensor], yes: Tensor, no: Tensor) -> Tensor:
        low, high = kept
        return torch.where(high, yes, 0) | torch.where(low, 0, no)

    def filled(self, state: Tensor, keep: Keep) -> Tensor:
        visible, hidden, filled = state & (KEPT | FILLED), state & HIDDEN, state & FILLED
        found = self._becomes(visible, keep.fill, 0.0) | self._becomes(hidden, keep.fill, -math.inf)
        # What an earlier statement made of a hidden pair may also be plus infinity.
        return found | self._becomes(filled, keep.fill, math.inf)

    def computed(self, state: Tensor, value: Expr) -> Tensor:
        if all(n is not SCORE for n in E.walk(value)):
            return self.shown
        # As in `filled`, a pair that was hidden before may be plus infinity here.
        hidden, filled = state & HIDDEN, state & FILLED
        found = self._becomes(hidden, value, -math.inf) | self._becomes(filled, value, math.inf)
        return state & (KEPT | FILLED) | found

    def weighed(self, state: Tensor) -> Tensor:
        return torch.where(state & HIDDEN > 0, state | FILLED, state)

    def _becomes(self, pairs: Tensor, formula: Expr, score: float) -> Tensor:
        """What becomes of `pairs` (where nonzero) when their score, which is `score`, becomes `formula`."""
        found = torch.tensor(HIDDEN | FILLED)
        if not set(unknown_names([formula], len(self.env.reads))) - {"s"}:
            names: dict[str, Value] = {"s": torch.tensor(score, dtype=self.env.dtype)}
            is_hidden = tensor(evaluate(formula, self.env, names), self.env) == -math.inf
            found = torch.where(is_hidden, HIDDEN, FILLED)
        return torch.where(pairs > 0, found, 0).to(torch.uint8)


def _truth(node: Expr, env: Environment) -> tuple[Tensor, Tensor]:
    """Where a predicate is true for certain, and where it may be."""
    if node.op == "not":
        low, high = _truth(node.args[0], env)
        return ~high, ~low
    if node.op in ("and", "or"):
        (a_low, a_high), (b_low, b_high) = (_truth(a, env) for a in node.args)
        return (a_low & b_low, a_high & b_high) if node.op == "and" else (a_low | b_low, a_high | b_high)
    if not unknown_names([node], len(env.reads)):
        value = as_bool(evaluate(node, env, {}), env)
        return value, value
    b, h, q, k = (Cut(*env.tile.range(name), 1) for name in INDICES)
    low, high = bit(bounds(node, Grid(b, h, q, k, tuple(env.sizes), env.reads), {}))
    return low >= 1, high > 0


def warn_of_blind_rows(program: ScoreProgram, shape: tuple[int, int, int, int], sizes: Sequence[int]) -> str:
    """What to tell of queries that see no key in a call with so many batches, heads, queries and keys, the
    sign of a mask that was inverted; "" if there is nothing to tell.

    A fill that is finite counts as hiding: such a row is the average over all keys, which nobody means by a
    mask. Masks that tensors decide count as seeing. In calls with very many pairs only the first and the last
    query are looked at: an inverted causal mask hides all keys from one of these.
    """
    if not program.keeps or 0 in shape:
        return ""
    named = {n.value for keep in program.keeps for n in E.walk(keep.predicate) if n.op == "var"}
    b, h, q, k = (n if name in named or name == "k" else 1 for name, n in zip("bhqk", shape, strict=True))
    rows = [(0, q)] if b * h * q * k <= budgets.PAIRS_LOOKED_AT else [(0, 1), (q - 1, q)]
    if b * h * rows[0][1] * k > budgets.PAIRS_LOOKED_AT:
        return ""
    blind: list[int] = []
    for first, stop in rows:
        tile = Tile((0, b), (0, h), (first, stop), (0, k))
        env = Environment(tile, (), sizes, torch.float32, torch.device("cpu"))
        seen = (visible(program, env) & KEPT > 0).any(-1).all(0).all(0)
        blind += ((~seen).nonzero().flatten() + first).tolist()
    if not blind:
        return ""
    if q == 1 < shape[2]:
        return "no query sees a key: is the mask inverted?"
    if len(rows) > 1:
        return f"query {blind[0]} of {q} sees no key: is the mask inverted?"
    return f"{len(blind)} of {q} queries see no key (query {blind[0]} is the first): is the mask inverted?"
