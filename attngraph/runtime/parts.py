"""The parts of a decoder's state: pages of cached values (`pages.py`), what each row carries, the prompt's
values.

A state grows, is cropped, reordered, saved and read by walking over its parts, each of which knows the values
that it keeps. What a row has changes only in a copy of the part, for which everything is had first: whoever
asks puts it in the place of what it was, or has what it was.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.ir.ops.cached_attention import Carried, Fixed
from attngraph.runtime import saved_cache
from attngraph.runtime.cache_config import CacheConfig

Kept = tuple[list[int], dict[str, Tensor]]


class Part:
    """Some values that a state keeps of every row."""

    name: str
    values: dict[str, Tensor]
    """What a step reads of it, by name."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for it."""
        return sum(t.nbytes for t in self.values.values())

    def after(self, news: Mapping[str, Any], lengths: Sequence[int]) -> "Part":
        """What it is after a step that computed `news`. `lengths`: of the rows before the step."""
        return self

    def check_crop(self, row: int, old: int, new: int) -> None:
        """Check that a row can go back from `old` to `new` tokens; else it is a CacheError."""

    def cropped(self, before: Sequence[int], lengths: Sequence[int]) -> "Part":
        """What it was when rows that have `before` tokens had so many, as `check_crop` has allowed."""
        return self

    def reordered(self, rows: Sequence[int]) -> "tuple[Part, list[tuple[int, int]]]":
        """Row n has what row rows[n] did; and which pages have yet to be copied, and where to."""
        raise NotImplementedError

    def saved(self) -> Any:
        """What `restored` reads."""
        return self.values

    def restored(self, saved: Any, lengths: Sequence[int]) -> "Part":
        """The same part with what was saved, if that fits rows of these lengths; else it is a CacheError."""
        raise NotImplementedError


class FixedValues(Part):
    """Values of the prompt, which no token changes."""

    name = "fixed"

    def __init__(self, plan: Sequence[Fixed], device: torch.device, values: Mapping[str, Tensor]) -> None:
        self.plan, self.device, self.values = tuple(plan), device, dict(values)

    def reordered(self, rows: Sequence[int]) -> tuple[Part, list[tuple[int, int]]]:
        by_row = [about for about in self.plan if about.row_dim is not None and about.name in self.values]
        picked = {about.name: _select_rows(self.values[about.name], about, rows) for about in by_row}
        return FixedValues(self.plan, self.device, self.values | picked), []

    def restored(self, saved: Any, lengths: Sequence[int]) -> Part:
        about = {value.name: value for value in self.plan}
        known = isinstance(saved, dict) and saved.keys() in (set(), about.keys())
        saved_cache.require(known, "its values of the prompt are others than its plan names")
        for name, value in saved.items():
            saved_cache.tensor(value, name, None, None, self.device)
            dim, own, rows = about[name].row_dim, about[name].own, len(lengths)
            fits = dim is None or (0 <= dim < value.ndim and own >= 1 and value.shape[dim] == rows * own)
            saved_cache.require(fits, f"{name} is {tuple(value.shape)}, which is not of {rows} row(s)")
        return FixedValues(self.plan, self.device, saved)


def _select_rows(value: Tensor, about: Fixed, rows: Sequence[int]) -> Tensor:
    """The entries of these rows in a fixed value."""
    assert about.row_dim is not None
    count = value.shape[about.row_dim] // about.own
    if list(rows) == list(range(count)):
        return value
    shape = (count, about.own) if about.together else (about.own, count)
    place = about.row_dim + (0 if about.together else 1)
    index = torch.tensor(list(rows), device=value.device)
    split = value.reshape(*value.shape[: about.row_dim], *shape, *value.shape[about.row_dim + 1 :])
    return torch.flatten(split.index_select(place, index), about.row_dim, about.row_dim + 1)


class CarriedValues(Part):
    """Values of which each row has one, whatever its length: sums over earlier tokens, states of recurrences.
    `values`: `[rows, ...]` by name; zero before a row's first token.

    A step computes the next ones as new tensors, so earlier ones can be kept as they are: tokens cannot be
    taken out of a sum, but a row can go back to where a call of the decoder began, if
    `CacheConfig(snapshots=...)` keeps what was carried there."""

    name = "carried"

    def __init__(self, plan: Sequence[Carried], rows: int, config: CacheConfig, device: torch.device) -> None:
        self.plan, self.device = tuple(plan), device
        self.wide = config.dtype == torch.float64
        self.values = {
            about.name: torch.zeros((rows, *about.shape), dtype=self._dtype(about), device=device)
            for about in self.plan
        }
        self.snapshots = config.snapshots
        self.earlier: tuple[Kept, ...] = ()
        """Lengths of the rows before the latest calls, and what they carried."""

    def _with(self, values: dict[str, Tensor], earlier: Iterable[Kept]) -> "CarriedValues":
        other = copy.copy(self)
        kept = tuple(earlier)
        other.values, other.earlier = values, kept[max(0, len(kept) - self.snapshots) :]
        return other

    def _dtype(self, about: Carried) -> torch.dtype:
        return torch.float64 if self.wide and about.dtype.is_floating_point else about.dtype

    @property
    def nbytes(self) -> int:
        kept = [self.values, *(values for _, values in self.earlier)]
        return sum(t.nbytes for t in {id(t): t for values in kept for t in values.values()}.values())

    def after(self, news: Mapping[str, Any], lengths: Sequence[int]) -> Part:
        if not self.plan:
            return self
        values = {about.name: news[about.name] for about in self.plan}
        return self._with(values, (*self.earlier, (list(lengths), self.values)))

    def check_crop(self, row: int, old: int, new: int) -> None:
        if not self.plan or new in (0, old) or self._snapshot(row, new) is not None:
            return
        kept = sorted({lengths[row] for lengths, _ in self.earlier if lengths[row] < old})
        known = f"it can go back to {', '.join(map(str, kept))}; " if kept else ""
        raise CacheError(
            f"row {row} cannot go back from {old} to {new} tokens: it carries a sum over its tokens, from "
            f"which none can be taken; {known}CacheConfig(snapshots=...) keeps what was carried before so "
            "many calls."
        )

    def cropped(self, before: Sequence[int], lengths: Sequence[int]) -> Part:
        rows = [row for row, (old, new) in enumerate(zip(before, lengths, strict=True)) if new != old]
        if not self.plan or not rows:
            return self
        values = {name: value.clone() for name, value in self.values.items()}
        for row in rows:
            found = None if lengths[row] == 0 else self._snapshot(row, lengths[row])
            for name, value in values.items():
                value[row] = 0 if found is None else found[name][row]

        def known(row: int, length: int) -> int:
            """-1 where the snapshot is of what was carried later, or by the tokens of another request."""
            return -1 if row in rows and (lengths[row] == 0 or length > lengths[row]) else length

        return self._with(values, (([known(*n) for n in enumerate(own)], kept) for own, kept in self.earlier))

    def _snapshot(self, row: int, length: int) -> dict[str, Tensor] | None:
        return next((values for lengths, values in reversed(self.earlier) if lengths[row] == length), None)

    def reordered(self, rows: Sequence[int]) -> tuple[Part, list[tuple[int, int]]]:
        if not self.plan:
            return self, []
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.device)

        def picked(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.index_select(0, index) for name, value in values.items()}

        earlier = (([lengths[r] for r in rows], picked(values)) for lengths, values in self.earlier)
        return self._with(picked(self.values), earlier), []

    def saved(self) -> dict[str, Any]:
        return {"values": self.values, "earlier": list(self.earlier)}

    def restored(self, saved: Any, lengths: Sequence[int]) -> Part:
        require, rows = saved_cache.require, len(lengths)
        named = isinstance(saved, dict) and saved.keys() == {"values", "earlier"}
        require(named, "what it carries is no record")
        known = type(saved["earlier"]) is list and len(saved["earlier"]) <= self.snapshots
        require(known, "it has other snapshots than its plan")
        earlier: list[Kept] = []
        for entry in saved["earlier"]:
            require(type(entry) in (list, tuple) and len(entry) == 2, "a snapshot of it is no pair")
            earlier.append((saved_cache.numbers(entry[0], "a snapshot", -1), self._checked(entry[1], rows)))
            require(len(entry[0]) == rows, "a snapshot has other rows")
        return self._with(self._checked(saved["values"], rows), earlier)

    def _checked(self, values: Any, rows: int) -> dict[str, Tensor]:
        """What so many rows carry, if it is what the plan says."""
        saved_cache.require(isinstance(values, dict), "what its rows carry is no record")
        same = values.keys() == {about.name for about in self.plan}
        saved_cache.require(same, "its rows carry other values")
        for about in self.plan:
            shape, dtype = (rows, *about.shape), self._dtype(about)
            saved_cache.tensor(values[about.name], about.name, shape, dtype, self.device)
        return dict(values)
