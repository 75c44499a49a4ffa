"""What happened before what: each event is a bit, and a clock is the set of those that are known to be over.

An agent is a warp group, or one asynchronous operation (a copy, a product), whose accesses are one event. A
warp group begins a new event whenever another may learn of what it did so far. Two accesses to one place, of
which one writes, are a race unless the later agent's clock has the earlier event, whatever the values are.

Warps access shared memory by the generic proxy, copies and products by the async proxy. What warps wrote is
there for the latter only if a fence lies between, on the way by which the later agent knows of the write:
`fenced` is the set of events of which that is so.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Sequence
from typing import Any

KERNELS: set[str] = set()
"""The files of kernels, by which their lines are found."""


class Wrong(Exception):
    """A fault of a kernel: what it is, and the line of the kernel at which it shows."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.place = here()


class Agent:
    """Who acts, and what is over for it: `seen` and, with a fence between, `fenced`."""

    numbers = itertools.count()

    def __init__(self, name: str, seen: int = 0, fenced: int = 0) -> None:
        self.name, self.seen, self.fenced = name, seen, fenced
        self.event = next(self.numbers)
        self.since = 0
        """Events of writes to global memory by several warps, of which a single one's atomics do not tell."""

    def next_event(self) -> None:
        """What it did so far is over for itself."""
        self.seen |= 1 << self.event
        self.event = next(self.numbers)

    def fork(self, name: str) -> Agent:
        """An operation that begins now and is under way."""
        self.next_event()
        return Agent(name, self.seen, self.fenced)

    def acquire(self, seen: int, fenced: int) -> None:
        """Learn what another released."""
        self.seen |= seen
        self.fenced |= fenced

    def fence(self) -> None:
        """`fence.proxy.async`."""
        self.next_event()
        self.fenced |= self.seen

    def released(self) -> tuple[int, int]:
        """What others may learn by what it does now: it and all that it knows of."""
        self.next_event()
        return self.seen, self.fenced


class Access:
    """One access to a box of `face`, which knows what its boxes are; `writes`: empty, `w`, `+` to add, `a` of
    an atomic."""

    __slots__ = ("box", "event", "face", "line", "proxy", "who", "writes")

    def __init__(self, who: Agent, face: Any, box: Any, proxy: str, writes: str) -> None:
        self.event, self.who, self.face, self.box = who.event, who.name, face, box
        self.proxy, self.writes, self.line = proxy, writes, here()

    def follows(self, old: Access, agent: Agent, alike: str = "") -> None:
        """Complain if this isn't ordered after an earlier one, unless both write in one of the ways of
        `alike`."""
        both = old.writes == self.writes and self.writes != "" and self.writes in alike
        if not both and old.event != self.event and not agent.seen >> old.event & 1:
            raise Wrong(f"race: {self},\n  and nothing orders that after: {old}")
        crossed = old.writes and old.event != self.event and (old.proxy, self.proxy) == ("generic", "async")
        if crossed and not (agent.fenced >> old.event & 1 and self.face.fences == "shared memory"):
            raise Wrong(f"no fence_async_shared: {self}\n  by the async proxy, after: {old}")

    def __str__(self) -> str:
        done = {"": "reads", "w": "writes", "+": "adds", "a": "changes"}[self.writes]
        return f"{self.who} {done} {self.face.name_of(self.box)} at {line_of(self.line)}"


def apart(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    """Whether two boxes have nothing in common."""
    return any(a >= d or c >= b for (a, b), (c, d) in zip(one, other, strict=True))


def within(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    """Whether the first box lies in the second."""
    return all(c <= a and b <= d for (a, b), (c, d) in zip(one, other, strict=True))


class Accesses:
    """Those to shared memory that later ones must be ordered with."""

    def __init__(self) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def add(self, agent: Agent, face: Any, box: Any, proxy: str, writes: str = "") -> None:
        """Note an access; `writes` is empty or `w`.

        Raises:
            Wrong: it is not ordered with an earlier one, or a fence is missing between them.
        """
        new = Access(agent, face, box, proxy, writes)
        for old in self.writes:
            if not face.apart(box, old.face, old.box):
                new.follows(old, agent)
        if not writes:
            if not any(o.event == new.event and o.face is face and o.box == box for o in self.reads):
                self.reads.append(new)
            return
        for old in self.reads:
            if not face.apart(box, old.face, old.box):
                new.follows(old, agent)
        self.reads = [o for o in self.reads if o.face is not face or not within(o.box, box)]
        self.writes = [o for o in self.writes if o.face is not face or not within(o.box, box)]
        self.writes.append(new)


def here() -> tuple[str, int]:
    """File and line of the kernel that runs."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in KERNELS:
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def line_of(place: tuple[str, int]) -> str:
    """A line of a kernel, with its number."""
    return f"line {place[1]}: {linecache.getline(*place).strip()}"
