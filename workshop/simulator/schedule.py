"""Warps as coroutines in a random order: which of them goes on is drawn at each place where they meet.

A coroutine yields before it asks a barrier, and while it is `blocked` it isn't drawn. Programs begin in the
order of their numbers, `resident` of them at a time, as on a card.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

from workshop.simulator.order import KERNELS, Agent, Wrong, line_of

SHARED = 232448
"""Bytes of shared memory that a program may have, on sm_90 and sm_100."""
Body = Generator[None, None, Any]


class Deadlock(Wrong):
    """Nobody can go on; the message has the state of all warps."""


class Program:
    """One program: where it is in the grid, and what it holds."""

    def __init__(self, at: tuple[int, int, int]) -> None:
        self.at, self.alive = at, 0
        self.bytes = self.columns = 0
        self.begun = 0
        """Copies and products of which somebody must know that they are over."""
        self.named: dict[int, Any] = {}

    def allocate(self, size: int, name: str) -> None:
        """Take shared memory."""
        self.bytes += size
        if self.bytes > SHARED:
            raise Wrong(f"shared memory: {self.bytes} bytes with {name}; a program may have {SHARED}")


class Thread(Agent):
    """A warp group's thread of control, or what ends an asynchronous operation (`program` is None)."""

    def __init__(
        self, name: str, program: Program | None, warps: int = 0, parent: Agent | None = None
    ) -> None:
        super().__init__(name)
        self.program: Any = program
        self.warps, self.is_over = warps, False
        self.body: Any = None
        self.blocked: Callable[[], str] | None = None
        self.products: list[Any] = []
        self.stores: list[Any] = []
        self.begun = 0
        """Products in tensor memory, which barriers end, and what was before them."""
        self.polled: Any = None
        self.asks: tuple[Any, int] = (None, 0)
        if parent is not None:
            self.acquire(*parent.released())

    def where(self) -> tuple[str, int]:
        """File and line at which it stands."""
        found, body = ("", 0), self.body
        while getattr(body, "gi_frame", None) is not None:
            if body.gi_code.co_filename in KERNELS:
                found = body.gi_code.co_filename, body.gi_frame.f_lineno
            body = body.gi_yieldfrom
        return found

    def finish(self) -> None:
        """Nothing that it began may outlive it."""
        if self.products:
            raise Wrong(f"{self.name} ends while {len(self.products)} products are under way")
        if any(not store.read for store in self.stores):
            raise Wrong(f"{self.name} ends while a copy to global memory still reads its shared memory")


class World:
    """One launch."""

    now: World
    current: Thread
    """The launch that runs, and who runs in it."""

    def __init__(self, grid: Sequence[int], options: Any, begin: Callable[[], Body], seed: int) -> None:
        self.random, self.options, self.begin = random.Random(seed).random, options, begin
        self.grid = x, y, z = (*grid, 1, 1)[:3]
        self.waiting = [Program((i, j, k)) for k in range(z) for j in range(y) for i in range(x)][::-1]
        self.ready: list[Thread] = []
        self.stuck: list[Thread] = []
        self.resident, self.changes = 0, 0
        World.now, Agent.numbers = self, itertools.count()

    def run(self) -> None:
        """Until all programs are over.

        Raises:
            Wrong: the kernel has a fault.
        """
        self._start()
        while self.ready:
            place = int(self.random() * len(self.ready))
            thread = World.current = self.ready[place]
            over = next(thread.body, self) is self
            if over or thread.blocked is not None:
                self.ready[place] = self.ready[-1]
                self.ready.pop()
                if over:
                    self._over(thread)
                else:
                    self.stuck.append(thread)
        if self.stuck:
            raise Deadlock(f"deadlock:\n{self.states()}")

    def _start(self) -> None:
        while self.waiting and self.resident < (self.options.resident or len(self.waiting) + self.resident):
            program = self.waiting.pop()
            self.resident += 1
            numbers = ", ".join(map(str, program.at))
            self.spawn(Thread(f"program ({numbers})", program, self.options.num_warps), self.begin())

    def spawn(self, thread: Thread, body: Body) -> None:
        """Let a thread begin."""
        thread.body = body
        self.ready.append(thread)
        if thread.program is not None:
            thread.program.alive += 1

    def later(self, action: Callable[[], object]) -> None:
        """Do something at some time from now on."""
        self.spawn(Thread("", None), (x for x in (None,) if action()))

    def wake(self) -> None:
        """Something has changed: all who wait look again."""
        self.changes += 1
        for thread in self.stuck:
            thread.blocked = None
        self.ready += self.stuck
        self.stuck = []

    def _over(self, thread: Thread) -> None:
        if thread.program is None:
            return
        thread.finish()
        thread.program.alive -= 1
        if thread.program.alive == 0:
            if thread.program.begun & ~thread.seen:
                raise Wrong(f"{thread.name} ends, and nobody has waited for a copy or product that it began")
            self.resident -= 1
            self._start()
        self.wake()

    def states(self) -> str:
        """What each warp waits for."""
        told = [
            f"  {thread.name} at {line_of(thread.where())}\n    {thread.blocked() if thread.blocked else ''}"
            for thread in self.stuck[:12]
        ]
        more = [f"  and {len(self.waiting)} programs that have not begun"] if self.waiting else []
        return "\n".join(told + more)
