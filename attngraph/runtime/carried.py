"""Values of which each row has one, whatever its length: sums over earlier tokens, states of recurrences.

A step computes the next ones as new tensors, so a step that fails changes nothing, and earlier ones can be
kept as they are: tokens cannot be taken out of a sum, but a row can go back to where a call of the decoder
began, if `CacheConfig(snapshots=...)` keeps what was carried there.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.errors import CacheError
from attngraph.ir.ops.cached_attention import Carried
from attngraph.runtime.cache_config import CacheConfig


class CarriedValues:
    """What the rows of a batch carry, `values`: `[rows, ...]` by name; zero before a row's first token."""

    def __init__(self, plan: Sequence[Carried], rows: int, config: CacheConfig, device: torch.device) -> None:
        self.plan, self.device = tuple(plan), device
        self.wide = config.dtype == torch.float64
        self.values = {about.name: self._zeros(about, rows) for about in self.plan}
        self.earlier: collections.deque[tuple[list[int], dict[str, Tensor]]] = collections.deque(
            maxlen=config.snapshots
        )
        """Lengths of the rows before the latest calls, and what they carried."""

    def _zeros(self, about: Carried, rows: int) -> Tensor:
        dtype = torch.float64 if self.wide and about.dtype.is_floating_point else about.dtype
        return torch.zeros((rows, *about.shape), dtype=dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        kept = [self.values, *(values for _, values in self.earlier)]
        return sum(t.nbytes for t in {id(t): t for values in kept for t in values.values()}.values())

    def write(self, news: Mapping[str, Tensor], lengths: Sequence[int]) -> None:
        """Carry on with what a step computed. `lengths`: of the rows before the step."""
        if not self.plan:
            return
        self.earlier.append((list(lengths), self.values))
        self.values = {about.name: news[about.name] for about in self.plan}

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

    def crop(self, row: int, old: int, new: int) -> None:
        """Go back to what the row carried when it had `new` tokens; `check_crop` has shown that it is
        kept."""
        if not self.plan or new == old:
            return
        found = None if new == 0 else self._snapshot(row, new)
        self.values = {name: value.clone() for name, value in self.values.items()}
        for name, value in self.values.items():
            value[row] = 0 if found is None else found[name][row]
        for lengths, _ in self.earlier:  # what was carried later, or by the tokens of another request
            if new == 0 or lengths[row] > new:
                lengths[row] = -1

    def _snapshot(self, row: int, length: int) -> dict[str, Tensor] | None:
        return next((values for lengths, values in reversed(self.earlier) if lengths[row] == length), None)

    def reorder(self, rows: Sequence[int]) -> None:
        """Row n becomes a copy of row rows[n]."""
        if not self.plan:
            return
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.device)

        def picked(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.index_select(0, index) for name, value in values.items()}

        self.values = picked(self.values)
        earlier = [([lengths[r] for r in rows], picked(values)) for lengths, values in self.earlier]
        self.earlier = collections.deque(earlier, maxlen=self.earlier.maxlen)

    def saved(self) -> dict[str, Any]:
        """What `restore` reads."""
        return {"values": self.values, "earlier": list(self.earlier)}

    def restore(self, saved: Sequence[tuple[list[int], dict[str, Tensor]]]) -> None:
        """Carry on with what was saved: what was carried before, by length, and last what is carried now."""
        *earlier, (_, self.values) = saved
        self.earlier.extend(earlier)
