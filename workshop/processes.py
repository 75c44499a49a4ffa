"""Processes of their own for what may crash, hang or leave traces.

A task has a process with a time limit that gives one row; these are copies of one that has imported what all
of them need. A server is a process that answers questions until it is told to end.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

Row = dict[str, Any]


@dataclass(frozen=True)
class Tasks:
    """What is run: `work(name, answer)` sends the row of a task, which has its name as `task`.

    Attributes:
        work: the target of a process, which a new process can import.
        preload: the module that imports what all processes need.
    """

    work: Callable[[str, Connection], None]
    preload: str

    def one(self, name: str, limit: float) -> Row:
        """The row of one task, from a process that has everything imported already when it starts."""
        with self._process(name) as process:
            return process.row(limit)

    def in_turns(self, names: Sequence[str], limit: float, until: float = math.inf) -> list[Row]:
        """The rows of tasks that prepare at the same time and then work one after another: each calls
        `wait_for_turn` between the two. `limit`: seconds for all preparations together, and for each task's
        work. `until`: when all of it ends, by `time.monotonic`."""
        with ExitStack() as stack:
            started = [stack.enter_context(self._process(name)) for name in names]
            end = min(time.monotonic() + limit, until)
            for process in started:
                process.prepared(max(0.0, end - time.monotonic()))
            return [process.row(max(0.0, min(limit, until - time.monotonic()))) for process in started]

    @contextmanager
    def _process(self, name: str) -> Iterator[_Process]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self.preload])
        mine, theirs = context.Pipe()
        process = context.Process(target=self.work, args=(name, theirs))
        process.start()
        theirs.close()
        try:
            yield _Process(name, process, mine)
        finally:
            process.kill()
            process.join()


def quietly() -> None:
    """What the process of a task begins with: no warnings, and one thread."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


def limits(parser: argparse.ArgumentParser) -> None:
    """The options of a suite whose cells are tasks."""
    parser.add_argument("--seconds", type=float, default=240, help="time limit of a task (default: 240)")
    parser.add_argument("--at-once", type=int, default=1, help="processes at a time (default: 1)")


PREPARED = "prepared"
"""What a process says when it waits for its turn."""


def wait_for_turn(answer: Connection) -> None:
    """Say that this task's preparations are done, and wait until it is told to work."""
    answer.send(PREPARED)
    answer.recv()


@dataclass
class _Process:
    """The process of one task, and this end of its pipe."""

    name: str
    process: BaseProcess
    pipe: Connection
    heard: Row | str | None = None
    """What it said last: that it is prepared, or its row."""

    def prepared(self, limit: float) -> None:
        """Wait until it waits for its turn, or has ended."""
        if self.heard is None:
            self.heard = self._listen(limit)

    def row(self, limit: float) -> Row:
        """Its row. It is told to work, if it waits for that."""
        self.prepared(limit)
        if self.heard == PREPARED:
            self.pipe.send(None)
            self.heard = self._listen(limit)
        assert isinstance(self.heard, dict)
        return self.heard

    def _listen(self, limit: float) -> Row | str:
        try:
            if self.pipe.poll(limit):
                said: Row | str = self.pipe.recv()
                return said
            self.process.kill()
            reason = f"longer than {limit:.0f} s"
            return {"task": self.name, "outcome": "out of time", "reason": reason}
        except EOFError:
            self.process.join(5)
            reason = f"its process ended with {self.process.exitcode}"
            return {"task": self.name, "outcome": "failed", "reason": reason}


class Ended(Exception):
    """A process died, or gave no answer in time; the text says which."""


class Server:
    """A process that answers one question after another: `serve(*arguments, pipe)`. Not safe for several
    threads at once, except `kill`."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *what: Any, limit: float) -> Any:
        """The answer.

        Raises:
            Ended: there is none.
        """
        try:
            self._pipe.send(what)
            if self._pipe.poll(limit):
                return self._pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise Ended(f"its process ended with {self.process.exitcode}") from None
        raise Ended(f"no answer in {limit:.0f} s")

    def kill(self) -> None:
        """End the process at once, so that who waits for an answer is told. Callable from any thread."""
        self.process.kill()

    def close(self, patience: float = 0.0) -> None:
        """Let the process end, and kill it if it does not in time."""
        self._pipe.close()
        self.process.join(patience)
        self.process.kill()
        self.process.join()
