"""A process that runs cases for the process that started it, and is replaced if it dies or hangs."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from multiprocessing.connection import Connection

import torch

from workshop.fuzz.compare import Outcome, check
from workshop.fuzz.grammar import Case
from workshop.processes import Ended, Server

LONGEST = 60.0
"""Seconds of processor time that a case may take before it counts as hanging."""
LONGEST_WAIT = 5 * LONGEST
"""The limit in seconds of elapsed time, for a process that waits or gets little processor time."""
_MANY = 20
"""Cases between garbage collections: collecting all the time would take a sixth of the run time."""


class Worker:
    """Handle of one process, which is started when it is needed. Not safe for several threads at once, except
    `kill`."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def run(self, case: Case, seed: int) -> Outcome:
        """The outcome of a case; "crashes" and "hangs" are kinds of failure too."""
        server = self._server = self._server or Server(_serve)
        try:
            outcome: Outcome = server.ask(case, seed, limit=LONGEST_WAIT)
            return outcome
        except Ended as problem:
            code = server.process.exitcode
            self._server = None
            server.close()
            if code is not None and code == -getattr(signal, "SIGPROF", 0):
                return Outcome("hangs", f"no answer after {LONGEST:.0f} s of processor time")
            return Outcome("hangs" if code is None else "crashes", str(problem))

    def kill(self) -> None:
        """End the process at once, so that a waiting call of `run` returns. Callable from any thread."""
        if (server := self._server) is not None:
            server.kill()

    def close(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        if self._server is not None:
            self._server.close(patience=5)
        self._server = None


def _serve(connection: Connection) -> None:
    """Answer cases with outcomes until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # output of the compiler, and of libraries at exit, would break the progress line
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    done = 0
    while True:
        try:
            case, seed = connection.recv()
        except EOFError:
            return
        _limit(LONGEST)
        outcome = check(case, seed=seed)
        _limit(0)
        connection.send(outcome)
        done += 1
        if done % _MANY == 0:
            gc.collect()


def _limit(seconds: float) -> None:
    """Let the system end this process after this much processor time; zero removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
