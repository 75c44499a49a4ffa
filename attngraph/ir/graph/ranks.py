"""What a graph for several ranks says about them: their number, and what each has of parameters.

One graph serves all ranks. What differs between them are inputs: "shard" is a rank's part of a parameter,
"places" a list of numbers (of heads, say, or where in a whole value a rank's part is).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rank's part of a parameter: of each dimension in `dims` the indices `places[d][rank]`."""

    parameter: str
    dims: tuple[int, ...]
    places: tuple[Tensor, ...]

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """The part of one rank, as a function of the whole parameter."""
        for dim, places in zip(self.dims, self.places, strict=True):
            whole = whole.index_select(dim, places[rank].to(whole.device))
        return whole


@dataclasses.dataclass
class Ranks:
    """The ranks that a graph is for.

    Attributes:
        count: how many there are. group: the name of their process group.
        shards: a rank's parts of parameters, by the name of the input.
        places: numbers for each rank, `[ranks, n]`, by the name of the input.
        entry, context: what the report says about them (`report.ranks.RanksEntry`, `ContextEntry`).
    """

    count: int
    group: str
    shards: dict[str, Shard] = dataclasses.field(default_factory=dict)
    places: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    entry: Any = None
    context: Any = None
