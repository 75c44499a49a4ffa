"""The tables of spellings, the decorators that enter a function in one of them, and the operands that most
of them take.

Operands are made from the lengths in `size`, which the tests change to see whether a graph serves other
lengths. A function that names one of them in its own body is therefore compared at one size only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

H, D = 4, 8
INF = float("inf")


class size:
    """Sequences, queries, and keys of cross-attention."""

    B, T, S = 2, 7, 9


Function = Callable[..., Any]
Operands = Callable[[], tuple[Tensor, ...]]
Table = dict[str, tuple[Function, Operands]]
MUST_FUSE: Table = {}
MUST_NOT: Table = {}
NOT_YET: Table = {}
MUTANTS: Table = {}
COUNT: dict[str, int] = {}
"""How many attentions a spelling fuses to, where it is not one."""
TOLERANCE: dict[str, float] = {}
"""How far a result may be from eager's, where it is not the tests' usual 1e-10."""


def enter(
    table: Table, operands: Operands, count: int = 1, tolerance: float | None = None
) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        name = function.__name__
        assert not any(name in t for t in (MUST_FUSE, MUST_NOT, NOT_YET, MUTANTS)), f"{name} is there twice"
        table[name] = (function, operands)
        if count != 1:
            COUNT[name] = count
        if tolerance is not None:
            TOLERANCE[name] = tolerance
        return function

    return add


def spelling(operands: Operands, count: int = 1) -> Callable[[Function], Function]:
    """Attention: it must fuse, to `count` attentions."""
    return enter(MUST_FUSE, operands, count)


def near_miss(operands: Operands) -> Callable[[Function], Function]:
    """Not attention: it must be left alone."""
    return enter(MUST_NOT, operands)


def not_yet(operands: Operands) -> Callable[[Function], Function]:
    """Attention that does not fuse so far."""
    return enter(NOT_YET, operands)


def mutant(operands: Operands, tolerance: float | None = None) -> Callable[[Function], Function]:
    """A spelling with one thing changed: it may fuse, with the meaning that it then has."""
    return enter(MUTANTS, operands, tolerance=tolerance)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def normals(shapes: str) -> tuple[Tensor, ...]:
    """Of shapes in letters and digits: "BHTD BT4" is one tensor `[B, H, T, D]` and one `[B, T, 4]`."""
    extents = {"B": size.B, "T": size.T, "S": size.S, "H": H, "D": D}
    return tuple(normal(*(extents[x] if x in extents else int(x) for x in shape)) for shape in shapes.split())


def qkv() -> tuple[Tensor, ...]:
    return normals("BHTD BHTD BHTD")


def cross() -> tuple[Tensor, ...]:
    """As many keys as `size.S`, with wider values."""
    return (*normals("BHTD BHSD"), normal(size.B, H, size.S, D + 2))


def grouped() -> tuple[Tensor, ...]:
    """Two heads of keys for four of queries."""
    return normals("BHTD B2TD B2TD")


def with_padding() -> tuple[Tensor, ...]:
    """And a mask `[B, T]`: true for a token, false for padding, which every second row has."""
    lengths = size.T - 2 * (torch.arange(size.B) % 2)
    return (*qkv(), torch.arange(size.T) < lengths[:, None])


def causal(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).tril()
