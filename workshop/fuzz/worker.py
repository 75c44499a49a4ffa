"""A process that runs cases for the process that started it, and is replaced if it dies or hangs."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from multiprocessing.connection import Connection

import torch

from workshop.fuzz.compare import Outcome, check
from workshop.fuzz.grammar import Case

LONGEST = 60.0
"""Seconds of processor time that a case may take before it counts as hanging."""
LONGEST_WAIT = 5 * LONGEST
"""The limit in seconds of elapsed time, for a process that waits or gets little processor time."""
_MANY = 20
"""Cases between garbage collections: collecting all the time would take a sixth of the run time."""


class Worker:
    """Handle of one process. Not safe for several threads at once, except `kill`."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def run(self, case: Case, seed: int) -> Outcome:
        """The outcome of a case; "crashes" and "hangs" are kinds of failure too."""
        connection = self._connection or self._start()
        try:
            connection.send((case, seed))
            if not connection.poll(LONGEST_WAIT):
                return self._replace("hangs", f"no answer for {LONGEST_WAIT:.0f} s")
            outcome: Outcome = connection.recv()
            return outcome
        except (EOFError, OSError):
            process = self._process
            assert process is not None
            process.join(5)
            code = process.exitcode
            if hasattr(signal, "SIGPROF") and code == -signal.SIGPROF:
                return self._replace("hangs", f"no answer after {LONGEST:.0f} s of processor time")
            return self._replace("crashes", f"the process ended with exit code {code}")

    def kill(self) -> None:
        """End the process at once, so that a waiting call of `run` returns. Callable from any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(5)
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self._connection

    def _replace(self, kind: str, detail: str) -> Outcome:
        self.kill()
        self.close()
        return Outcome(kind, detail)


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
