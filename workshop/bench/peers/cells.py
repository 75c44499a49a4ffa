"""What is measured: a prompt computed at once, or one token of each row over a filled cache."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Cell:
    """`kept` is None for a whole prompt of `new` tokens, else how many tokens each row has in its cache."""

    model: str
    rows: int
    new: int
    kept: int | None = None

    def __str__(self) -> str:
        if self.kept is None:
            return f"{self.model}, prompt of {self.new}"
        return f"{self.model}, token, {self.kept} kept, batch {self.rows}"

    @property
    def calls(self) -> tuple[int, int]:
        """Calls in one turn: before timing, and timed."""
        return (1, 2) if self.kept is None else (3, 10)

    @property
    def room(self) -> int:
        """The most tokens that a row has in its cache."""
        return self.new if self.kept is None else self.kept + sum(self.calls)

    def ids(self, vocabulary: int) -> Tensor:
        """Tokens to begin with, and those that follow: `[rows, room]`."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocabulary, (self.rows, self.room), generator=generator)


def cells_of(model: str, is_small: bool) -> list[Cell]:
    """The cells of a model; a small run has one of each kind."""
    if is_small:
        return [Cell(model, 1, 16), Cell(model, 2, 1, 16)]
    prompts = [Cell(model, 1, new) for new in (128, 1024)]
    return prompts + [Cell(model, rows, 1, kept) for rows in (1, 8) for kept in (128, 1024)]


class Candidate(Protocol):
    """A way to run a model with a cache of its own. Made from the model; that is the time it needs to compile
    or convert, as far as it does not wait for the first calls."""

    def begin(self, rows: int, room: int) -> None:
        """Have an empty cache of so many rows, each with room for so many tokens."""

    def advance(self, ids: Tensor) -> Tensor:
        """The logits `[B, S, V]` of the next tokens `[B, S]` of every row, which the cache then holds."""

    def rewind(self, kept: int) -> None:
        """Forget all but the first tokens of each row."""
