"""Which indices of a dimension each rank has.

Heads inside a packed projection are one digit of its rows (`[3, heads, width]`), key/value heads that are
fewer than ranks are had by several, and rows of keys and values may follow unequal rows of queries. All of
these are one thing: for every rank a list of indices, ascending and equally long, so that one graph serves
all ranks. A value of which several dimensions are cut has the product of their lists.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import ProgramGraph, Rate
from attngraph.ir.ops.collectives import COLLECTIVES
from attngraph.ir.walk import reached

Places = Tensor
"""Indices, `[ranks, count]`, int64 on the CPU."""


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """`places[r]`: the indices that rank r has of a dimension of `extent` indices."""

    places: Places
    extent: int

    @classmethod
    def blocks(cls, extent: int, ranks: int) -> "Table":
        """Equal runs of neighbours, one for each rank."""
        return cls(torch.arange(extent, device="cpu").view(ranks, extent // ranks), extent)

    @classmethod
    def whole(cls, extent: int, ranks: int) -> "Table":
        """Every index, for every rank."""
        return cls(torch.arange(extent, device="cpu").repeat(ranks, 1), extent)

    @classmethod
    def of(cls, rows: Iterable[Tensor], extent: int) -> "Table | None":
        """The table of these indices, in ascending order; None where ranks would have unequally many."""
        found = [torch.unique(row) for row in rows]
        if len({len(row) for row in found}) != 1 or not len(found[0]):
            return None
        return cls(torch.stack(found), extent)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self.extent, tuple(self.places.shape), tuple(self.places.flatten().tolist())

    @property
    def ranks(self) -> int:
        return int(self.places.shape[0])

    @property
    def count(self) -> int:
        """How many indices each rank has."""
        return int(self.places.shape[1])

    @property
    def is_whole(self) -> bool:
        return self.count == self.extent

    @functools.cached_property
    def is_same(self) -> bool:
        """Whether every rank has the same indices."""
        return bool((self.places == self.places[0]).all())

    @property
    def copies(self) -> int:
        """How many ranks have the same indices, at most."""
        return int(torch.unique(self.places, dim=0, return_counts=True)[1].max())

    def united(self, other: "Table") -> "Table | None":
        """What is in either; None where ranks would have unequally many."""
        if self == other:
            return self
        return Table.of(map(torch.cat, zip(self.places, other.places, strict=True)), self.extent)

    def positions(self, wanted: "Table") -> Places | None:
        """For each rank, where its list has the indices wanted; None if it lacks one."""
        found = torch.searchsorted(self.places, wanted.places.contiguous())
        there = torch.take_along_dim(self.places, found.clamp(max=self.count - 1), 1)
        return found if torch.equal(there, wanted.places) else None

    def runs(self) -> int | None:
        """The number n such that the dimension is `[n, ranks, rest]` and a rank has one index of the middle
        digit: 1 for plain blocks. None for another cut."""
        if self.count * self.ranks != self.extent:
            return None
        runs = int((self.places[0].diff() != 1).sum()) + 1
        if self.count % runs:
            return None
        digit = torch.arange(self.extent, device="cpu").view(runs, self.ranks, self.count // runs)
        wanted = digit.transpose(0, 1).reshape(self.ranks, self.count)
        return runs if torch.equal(wanted, self.places) else None

    def describe(self) -> str:
        """In words: what a rank has of the dimension."""
        if self.is_whole:
            return f"all of {self.extent}"
        runs = self.runs()
        digit = "" if runs in (None, 1) else f", in {runs} runs"
        shared = f", each by {self.copies} ranks" if self.copies > 1 else ""
        return f"{self.count} of {self.extent}{digit}{shared}"


Cut = Mapping[int, Table]
"""The cut dimensions of a value; every rank has all of the others."""


def is_cut(cut: Cut) -> bool:
    """Whether ranks have different parts of a value."""
    return any(not table.is_same for table in cut.values())


def united(cuts: Iterable[Cut]) -> Cut | None:
    """The smallest cut of which all of these are parts; None where ranks would have unequally many."""
    first, *others = cuts
    found = dict(first)
    for cut in others:
        for dim in list(found):
            if dim not in cut:
                del found[dim]
                continue
            both = found[dim].united(cut[dim])
            if both is None:
                return None
            found[dim] = both
    return found


OF_A_RANK = ("shard", "places")
"""Kinds of inputs of which every rank has its own."""


def differing(graph: ProgramGraph) -> set[fx.Node]:
    """The values that differ by rank. What a graph keeps from one call to the next is as what it takes up:
    pages differ where what is written to them does."""
    prompt = graph.stages.get(Rate.PROMPT)
    before: set[str] = set()
    if prompt is not None:
        own = differing(prompt)
        before = {o.name for o, n in zip(prompt.outputs, prompt.results(), strict=True) if n in own}
    kept = {o.name: n for o, n in zip(graph.outputs, graph.results(), strict=True)
            if o.kind in ("pages", "carried")}  # fmt: skip
    while True:
        found = _following(graph, before)
        more = {name for name, node in kept.items() if node in found}
        if more <= before:
            return found
        before |= more


def _following(graph: ProgramGraph, names: set[str]) -> set[fx.Node]:
    """The values that follow from a rank's own inputs, or from the inputs of these names."""
    own = [
        n for n, i in graph.given().items()
        if i.kind in OF_A_RANK or (i.kind not in ("parameter", "buffer", "constant", "argument")
                                   and i.name in names)
    ]  # fmt: skip
    return set(reached(own, lambda node: [user for user in node.users if user.target not in COLLECTIVES]))
