"""The tables of spellings, the decorators that enter a function in one of them, and the operands that most
of them take.

Operands are made from the lengths in `size`, which the tests change to see whether a graph serves other
lengths. A function that names one of them in its own body is therefore compared at one size only.
"""

import sys
from collections.abc import Callable
from functools import partial
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


class enter:
    """Enters functions in a table, with the operands to call them with: those that are given by name, one
    that it decorates, or all that are defined in a `with` block."""

    def __init__(
        self, table: Table, operands: Operands, count: int = 1, tolerance: float | None = None,
        **functions: Function,
    ) -> None:  # fmt: skip
        self.table, self.operands, self.count, self.tolerance = table, operands, count, tolerance
        for name, function in functions.items():
            self.add(name, function)

    def add(self, name: str, function: Function) -> None:
        assert not any(name in t for t in (MUST_FUSE, MUST_NOT, NOT_YET, MUTANTS)), f"{name} is there twice"
        self.table[name] = (function, self.operands)
        if self.count != 1:
            COUNT[name] = self.count
        if self.tolerance is not None:
            TOLERANCE[name] = self.tolerance

    def __call__(self, function: Function) -> Function:
        self.add(function.__name__, function)
        return function

    def __enter__(self) -> None:
        self.names = sys._getframe(1).f_globals
        self.before = len(self.names)

    def __exit__(self, *_: object) -> None:
        for name, function in list(self.names.items())[self.before :]:
            self.add(name, function)


spelling = partial(enter, MUST_FUSE)
"""Attention: it must fuse, to `count` attentions."""
near_miss = partial(enter, MUST_NOT)
"""Not attention: it must be left alone."""
not_yet = partial(enter, NOT_YET)
"""Attention that does not fuse so far."""
mutant = partial(enter, MUTANTS)
"""A spelling with one thing changed: it may fuse, with the meaning that it then has."""


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
