"""Values of which each row has one, whatever its length: sums over earlier tokens, states of recurrences.

A step computes the next ones as new tensors, and what changes is another `CarriedValues`, so whatever fails
changes nothing, and earlier ones can be kept as they are: tokens cannot be taken out of a sum, but a row can
go back to where a call of the decoder began, if `CacheConfig(snapshots=...)` keeps what was carried there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.ir.ops.cached_attention import Carried
from attngraph.runtime.cache_config import CacheConfig

Kept = tuple[list[int], dict[str, Tensor]]


class CarriedValues:
    """What the rows of a batch carry, `values`: `[rows, ...]` by name; zero before a row's first token."""

    def __init__(self, plan: Sequence[Carried], rows: int, config: CacheConfig, device: torch.device) -> None:
        self.plan, self.device = tuple(plan), device
        self.wide = config.dtype == torch.float64
        self.values = {about.name: self._zeros(about, rows) for about in self.plan}
        self.snapshots = config.snapshots
        self.earlier: tuple[Kept, ...] = ()
        """Lengths of the rows before the latest calls, and what they carried."""

    def _with(self, values: dict[str, Tensor], earlier: Iterable[Kept]) -> CarriedValues:
        other = copy.copy(self)
        kept = tuple(earlier)
        other.values, other.earlier = values, kept[max(0, len(kept) - self.snapshots) :]
        return other

    def _zeros(self, about: Carried, rows: int) -> Tensor:
        dtype = torch.float64 if self.wide and about.dtype.is_floating_point else about.dtype
        return torch.zeros((rows, *about.shape), dtype=dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        kept = [self.values, *(values for _, values in self.earlier)]
        return sum(t.nbytes for t in {id(t): t for values in kept for t in values.values()}.values())

    def after(self, news: Mapping[str, Tensor], lengths: Sequence[int]) -> CarriedValues:
        """What a step computed is carried on. `lengths`: of the rows before the step."""
        if not self.plan:
            return self
        values = {about.name: news[about.name] for about in self.plan}
        return self._with(values, (*self.earlier, (list(lengths), self.values)))

    def check_crop(self, row: int, old: int, new: int) -> None:
        """Raise unless the row can go back from `old` to `new` tokens.

        Raises:
            CacheError: what it carried there is not kept.
        """
        if not self.plan or new in (0, old) or self._snapshot(row, new) is not None:
            return
        kept = sorted({lengths[row] for lengths, _ in self.earlier if lengths[row] < old})
        known = f"it can go back to {', '.join(map(str, kept))}; " if kept else ""
        raise CacheError(
            f"row {row} cannot go back from {old} to {new} tokens: it carries a sum over its tokens, from "
            f"which none can be taken; {known}CacheConfig(snapshots=...) keeps what was carried before so "
            "many calls."
        )

    def cropped(self, before: Sequence[int], lengths: Sequence[int]) -> CarriedValues:
        """What the rows carried when they had so many tokens; `check_crop` has shown that it is kept.
        `before`: how many they have."""
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

    def reordered(self, rows: Sequence[int]) -> CarriedValues:
        """Row n carries what row rows[n] did."""
        if not self.plan:
            return self
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.device)

        def picked(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.index_select(0, index) for name, value in values.items()}

        earlier = (([lengths[r] for r in rows], picked(values)) for lengths, values in self.earlier)
        return self._with(picked(self.values), earlier)

    def saved(self) -> dict[str, Any]:
        """What `restored` reads."""
        return {"values": self.values, "earlier": list(self.earlier)}

    def restored(self, saved: Sequence[Kept]) -> CarriedValues:
        """What was saved: what was carried before, by length, and last what is carried now."""
        *earlier, (_, values) = saved
        return self._with(values, earlier)
