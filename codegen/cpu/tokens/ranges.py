"""Loops in which selections by an index are decided: `where(i < 64, .., ..)` becomes a loop for each branch.

What reads several values side by side (joined heads, halves that a rotary embedding swaps) selects by index.
Each of the loops has one branch without a condition, which compilers turn into vector instructions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.functions import operation_of
from attngraph.ir.language.token_program import Definition, extent

LOOKED_AT = 1024
"""The largest extent for which it is computed where a condition on an index changes."""
UNROLLED = 8
"""The most loops that one is divided into where a formula selects by its index."""


def divided(made: Definition) -> Iterator[tuple[list[tuple[int, int]], Expr]]:
    """The ranges of the indices in which every selection by an index is decided, and the formula there.
    Where there would be many, the formula is left as it is."""
    full = [(0, n) for n in made.extents]
    cuts: list[list[int]] = [[0, n] for n in made.extents]
    for node in E.walk(made.value):
        if node.op == "where":
            for place, i in enumerate(made.indices):
                if _is_of_index(node.args[0], (i,)):
                    cuts[place] += _changes(node.args[0], i)
    cuts = [sorted(set(c)) for c in cuts]
    if math.prod(len(c) - 1 for c in cuts) > UNROLLED or all(len(c) == 2 for c in cuts):
        yield full, made.value
        return
    places = [list(itertools.pairwise(c)) for c in cuts]
    for ranges in _combinations(places):
        known = {i: low for i, (low, _) in zip(made.indices, ranges, strict=True)}
        yield list(ranges), _decided(made.value, known)


def _combinations(parts: list[list[tuple[int, int]]]) -> Iterator[list[tuple[int, int]]]:
    if not parts:
        yield []
        return
    for first in parts[0]:
        for rest in _combinations(parts[1:]):
            yield [first, *rest]


def _changes(condition: Expr, variable: Expr) -> list[int]:
    """Where a condition on an index alone changes as the index grows."""
    values = _truths(condition)
    return [n for n in range(1, extent(variable)) if values[n] != values[n - 1]]


def _truths(condition: Expr) -> list[bool]:
    """A condition on one index, for each of its values."""

    def of(node: Expr) -> Tensor:
        if node.op == "var":
            return torch.arange(extent(node))
        if node.op == "const":
            return torch.tensor(node.value)
        row = operation_of(node.op)
        assert row is not None, node
        return row.torch(*(of(a) for a in node.args))

    found: list[bool] = of(condition).tolist()
    return found


def _decided(value: Expr, known: dict[Expr, int]) -> Expr:
    """The formula with each selection decided whose condition depends on one of these indices alone."""

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op == "where" and _is_of_index(node.args[0], known):
            (place,) = node.args[0].free
            return args[1] if _truths(node.args[0])[known[place]] else args[2]
        return node if node.op == "var" or not args else E.make(node.op, args, node.value, node.kind)

    return E.rebuild(value, leaf)


def _is_of_index(condition: Expr, indices: Collection[Expr]) -> bool:
    """Whether a condition depends on one of these indices and on nothing else."""
    free = condition.free
    if len(free) != 1 or not free <= set(indices) or any(extent(i) > LOOKED_AT for i in free):
        return False
    return not any(n.op == "read" for n in E.walk(condition))
