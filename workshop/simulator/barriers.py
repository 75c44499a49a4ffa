"""Barriers in shared memory, which count arrivals and bytes, and named barriers, which count threads.

An mbarrier's phase is over when `count` arrivals and all bytes that were told of have come; `wait(p)` waits
until a phase of parity p is over. Beyond what the hardware checks it is an error to arrive more often than a
phase counts, to arrive twice in a phase, to end two phases of which nobody waits for the first, to copy bytes
that were not told of, and to end a program while a copy is under way.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from workshop.simulator.order import Agent, Wrong, here, line_of
from workshop.simulator.schedule import World

Steps = Generator[None, None, None]


class Barrier:
    """One mbarrier, or a named barrier."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self.phases = self.pending = self.told = self.sent = self.under_way = self.unseen = 0
        self.seen = self.fenced = self.next_seen = self.next_fenced = 0
        self.arrived: dict[Agent, tuple[str, int]] = {}
        self.made: int | None = None

    def init(self, count: int) -> None:
        """Begin the first phase."""
        if self.count:
            raise Wrong(f"{self.name} is initialised twice")
        if not 0 < count < 1 << 20:
            raise Wrong(f"{self.name} cannot count {count} arrivals")
        self.count = self.pending = count
        self.made = World.current.event

    def check(self, agent: Agent) -> None:
        """Whether it is there for an agent."""
        if not self.count:
            raise Wrong(f"{self.name} is used before mbarrier.init")
        if self.made not in (None, agent.event) and not agent.seen >> self.made & 1:
            raise Wrong(f"{self.name} is used by {agent.name}, and nothing orders that after mbarrier.init")

    def arrive(self, agent: Agent, count: int, once: bool) -> None:
        """So many arrivals of the phase that is under way."""
        self.check(agent)
        if once and agent in self.arrived:
            raise Wrong(
                f"double release: {agent.name} arrives twice in phase {self.phases} of {self.name}, first at "
                f"{line_of(self.arrived[agent])}"
            )
        if once:
            self.arrived[agent] = here()
        if count > self.pending:
            raise Wrong(f"{count} arrivals at {self.name}, and only {self.pending} are left of {self.count}")
        self.pending -= count
        self.learn(*agent.released())

    def learn(self, seen: int, fenced: int) -> None:
        """What whoever waits for this phase will know; it is over if this was all."""
        self.next_seen |= seen
        self.next_fenced |= fenced
        if self.pending or self.told != self.sent or self.under_way:
            return
        if self.unseen:
            raise Wrong(
                f"phase {self.phases} of {self.name} ends, and nobody has waited for the one before: it is "
                "released twice, or a wait is missing"
            )
        self.seen |= self.next_seen
        self.fenced |= self.next_fenced
        self.phases += 1
        self.unseen += 1
        self.pending = self.count
        self.told = self.sent = self.next_seen = self.next_fenced = 0
        self.arrived.clear()
        World.now.wake()

    def expect(self, agent: Agent, size: int) -> None:
        """`arrive.expect_tx`."""
        self.told += size
        self.arrive(agent, 1, False)

    def send(self, agent: Agent, size: int) -> None:
        """A copy begins that will bring bytes."""
        self.check(agent)
        self.sent += size
        if self.sent > self.told:
            raise Wrong(f"{self.name} expects {self.told} bytes in phase {self.phases}, {self.sent} are sent")
        self.under_way += 1

    def came(self, copy: Agent) -> None:
        """It is over."""
        self.under_way -= 1
        self.learn(copy.seen | 1 << copy.event, copy.fenced)

    def commit(self, events: int, by: str) -> None:
        """Products in tensor memory are over, which is one arrival."""
        self.under_way -= 1
        if not self.pending:
            raise Wrong(f"products of {by} arrive at {self.name}, which expects no arrival in this phase")
        self.pending -= 1
        self.learn(events, 0)

    def wait(self, phase: int) -> Steps:
        """`mbarrier.wait`."""
        thread = World.current
        yield
        self.check(thread)
        if phase not in (0, 1):
            raise Wrong(f"{self.name}: the parity of a phase is 0 or 1, not {phase}")
        while self.phases & 1 == phase:
            thread.blocked = lambda: f"waits for a phase of parity {phase} of {self}"
            yield
        thread.acquire(self.seen, self.fenced)
        self.unseen = 0

    def __str__(self) -> str:
        return (
            f"{self.name}: phase {self.phases} (parity {self.phases & 1}) is under way; missing are "
            f"{self.pending} of {self.count} arrivals and {self.told - self.sent} of {self.told} bytes"
            + (f", {self.under_way} copies are under way" if self.under_way else "")
        )


class Barriers:
    """What `allocate_shared_memory` gives with an `MBarrierLayout`."""

    def __init__(self, every: list[Barrier], name: str) -> None:
        self.every, self.name = every, name

    def index(self, place: Any) -> Barriers:
        """One of several."""
        if not 0 <= place < len(self.every):
            raise Wrong(f"{self.name} has {len(self.every)} barriers, not one with number {place}")
        return Barriers([self.every[place]], f"{self.name}[{place}]")


def one(barriers: Any) -> Barrier:
    """The barrier that is meant."""
    if not isinstance(barriers, Barriers) or len(barriers.every) != 1:
        raise Wrong(f"one mbarrier is needed, not {barriers!r}")
    return barriers.every[0]


def named(instruction: str, number: int, threads: int) -> Steps:
    """`bar.sync number, threads` or `bar.arrive number, threads`: a barrier that counts threads."""
    yield
    thread = World.current
    if not 1 <= number < 16:
        raise Wrong(f"named barriers have the numbers 1 to 15, not {number}")
    barrier = thread.program.named.setdefault(number, Barrier(f"named barrier {number}"))
    if barrier.pending == barrier.count:
        barrier.count = barrier.pending = threads
    if threads != barrier.count:
        raise Wrong(f"{barrier.name} is over {barrier.count} and over {threads} threads")
    phase = barrier.phases & 1
    barrier.arrive(thread, 32 * thread.warps, True)
    if instruction == "sync":
        yield from barrier.wait(phase)
