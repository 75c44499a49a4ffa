"""What a graph for several ranks says about them: the axes of their mesh, and what each has of its own.

One graph serves all ranks. What differs between them are inputs: "shard" is a rank's part of a parameter,
"places" a list of numbers (of heads, say, or where in a whole value a rank's part is). Each differs along one
axis; ranks that are apart along another have the same.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a mesh: how many ranks it has, and the name of their process group."""

    count: int
    group: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rank's part of a parameter: of each dimension in `dims` the indices `places[d][rank]`, along the axis
    `group`."""

    parameter: str
    dims: tuple[int, ...]
    places: tuple[Tensor, ...]
    group: str = ""

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """The part of one rank, as a function of the whole parameter."""
        for dim, places in zip(self.dims, self.places, strict=True):
            whole = whole.index_select(dim, places[rank].to(whole.device))
        return whole


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Whole numbers of each rank of the axis `group`, `[ranks, ...]`."""

    of: Tensor
    group: str


@dataclasses.dataclass
class Ranks:
    """The ranks that a graph is for.

    Attributes:
        axes: the axes of their mesh, in the order in which the graph was divided along them.
        shards: a rank's parts of parameters, by the name of the input.
        places: numbers that differ by rank, by the name of the input.
        trusts: bytes of a check above which there is none (None: there is always one), and `unproved`: how
            many parts that concerned.
        undivided: why ranks do not divide the tokens of a value that a decoder keeps, by its name.
        entry, context: what the report says about them (`report.ranks.RanksEntry`, `ContextEntry`).
    """

    axes: tuple[Axis, ...] = ()
    shards: dict[str, Shard] = dataclasses.field(default_factory=dict)
    places: dict[str, Numbers] = dataclasses.field(default_factory=dict)
    trusts: int | None = None
    unproved: int = 0
    undivided: dict[str, str] = dataclasses.field(default_factory=dict)
    entry: Any = None
    context: Any = None

    def along(self, axis: Axis) -> "Ranks":
        """The same with one more axis."""
        return dataclasses.replace(self, axes=(*self.axes, axis))

    @property
    def before(self) -> "Ranks":
        """The ranks that there were before the graph was divided along the last axis."""
        return dataclasses.replace(self, axes=self.axes[:-1])

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return math.prod(axis.count for axis in self.axes)

    def of_each(self, group: str, values: Sequence[_T]) -> list[_T]:
        """What every rank has of values that differ along one axis."""
        return [values[place] for place in self._places(group)]

    def is_first(self, group: str) -> list[bool]:
        """Of every rank, whether it is the first of those that are at the same place along the axis."""
        places = self._places(group)
        return [place not in places[:rank] for rank, place in enumerate(places)]

    def lines(self, group: str) -> list[list[int]]:
        """The ranks of every process group along an axis: those that differ along this axis alone."""
        found: dict[Any, list[int]] = {}
        place = self._axis(group)
        for rank, at in enumerate(self._grid()):
            found.setdefault(at[:place] + at[place + 1 :], []).append(rank)
        return list(found.values())

    def _axis(self, group: str) -> int:
        """The place of an axis; ValueError where there is none of this group."""
        return [axis.group for axis in self.axes].index(group)

    def _grid(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(axis.count) for axis in self.axes)))

    def _places(self, group: str) -> list[int]:
        axis = self._axis(group)
        return [at[axis] for at in self._grid()]
