"""Exchanges inside of an operation: members of a team send each other parts of a tensor.

A team is so many neighbours among the ranks of a process group. An operation that exchanges is run by all of
them at the same time. Where ranks are simulated in one process, `together` runs it for one rank after the
other, and again from its beginning after every exchange, until all are done.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.ops.collectives import rank_in

EXCHANGING: set[Any] = set()
"""The operations that exchange; their last argument is the process group."""
_local = threading.local()


@dataclasses.dataclass(frozen=True)
class Team:
    """`size` neighbours among the `ranks` of a process group."""

    size: int
    ranks: int
    group: str

    @property
    def member(self) -> int:
        """Which of its team this rank is."""
        run = _simulated()
        return (rank_in(self.group) if run is None else run.rank) % self.size

    def swapped(self, parts: Tensor) -> Tensor:
        """Send `parts[n]` to member n; what the members sent to this rank, `[team, ...]`."""
        run = _simulated()
        if run is not None:
            return run.swapped(parts, self)
        functional, rank = torch.ops._c10d_functional, rank_in(self.group)
        first = rank - rank % self.size
        counts = [int(first <= other < first + self.size) for other in range(self.ranks)]
        found: Tensor = functional.all_to_all_single(parts.contiguous(), counts, counts, self.group)
        return functional.wait_tensor(found)  # type: ignore[no-any-return]


class _Waits(Exception):
    """An operation of a simulated rank has come to an exchange that the others have not come to yet."""

    def __init__(self, parts: Tensor, team: Team) -> None:
        super().__init__("an exchange of simulated ranks")
        self.parts, self.team = parts, team


@dataclasses.dataclass
class _Run:
    """An operation run for one simulated rank. `received`: what it gets in the exchanges that are done."""

    rank: int
    received: list[Tensor]
    done: int = 0

    def swapped(self, parts: Tensor, team: Team) -> Tensor:
        if self.done == len(self.received):
            raise _Waits(parts, team)
        self.done += 1
        return self.received[self.done - 1]


def _simulated() -> _Run | None:
    return getattr(_local, "run", None)


def together(runs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run an operation for all ranks of a group, `runs[n]` for rank n; the results.

    Raises:
        RuntimeError: some ranks exchange and others do not.
    """
    received: list[list[Tensor]] = [[] for _ in runs]
    while True:
        waiting, results = list[_Waits](), []
        for rank, run in enumerate(runs):
            _local.run = _Run(rank, received[rank])
            try:
                results.append(run())
            except _Waits as exchange:
                waiting.append(exchange)
            finally:
                _local.run = None
        if not waiting:
            return results
        if results:
            raise RuntimeError("some ranks exchange values and others do not. Please report it.")
        size = waiting[0].team.size
        for rank, own in enumerate(received):
            first = rank - rank % size
            own.append(torch.stack([w.parts[rank - first] for w in waiting[first : first + size]]))
