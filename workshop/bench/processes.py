"""Gives every task of a benchmark a process with a time limit, and keeps the rows in a file.

A row that the file has already is not computed again, so a run that was cut off goes on. The processes are
copies of one that has imported what all of them need.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import Any

import torch

Row = dict[str, Any]


@dataclass(frozen=True)
class Tasks:
    """What is run: `work(name, answer)` sends the row of a task through `answer`.

    Attributes:
        key: the entry of a row that has the task's name.
        work: the target of a process, which a new process can import.
        preload: the module that imports what all processes need.
    """

    key: str
    work: Callable[[str, Connection], None]
    preload: str

    def known(self, file: Path | None) -> list[Row]:
        """The rows of an earlier run; a later row of a task replaces an earlier one."""
        if file is None or not file.exists():
            return []
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        return list({row[self.key]: row for row in rows}.values())

    def parser(self, about: str | None) -> argparse.ArgumentParser:
        """The arguments that every command over tasks has. What it parses is given to `run`."""
        package = self.preload.rpartition(".")[0]
        parser = argparse.ArgumentParser(prog=f"python -m {package}", description=about)
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="JSON lines; a run goes on where it ended"
        )
        parser.add_argument("--table", type=Path, metavar="FILE", help="write the table here")
        parser.add_argument("--seconds", type=float, default=240, help="time limit of a task (default: 240)")
        parser.add_argument("--at-once", type=int, default=1, help="processes at a time (default: 1)")
        return parser

    def run(self, names: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
        """The rows of these tasks; new ones are appended to the file at once. Progress goes to standard
        error."""
        file: Path | None = arguments.json
        found = {row[self.key]: row for row in self.known(file)}
        writing = Lock()

        def compute(name: str) -> None:
            if name in found:
                return
            print(f"{names.index(name) + 1} of {len(names)}: {name}", file=sys.stderr, flush=True)
            row = self.one(name, arguments.seconds)
            with writing:
                found[name] = row
                if file is not None:
                    with file.open("a") as out:
                        out.write(json.dumps(row) + "\n")

        with ThreadPoolExecutor(arguments.at_once) as pool:
            list(pool.map(compute, names))
        return [found[name] for name in names]

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
            yield _Process(self.key, name, process, mine)
        finally:
            process.kill()
            process.join()


PREPARED = "prepared"
"""What a process says when it waits for its turn."""


def wait_for_turn(answer: Connection) -> None:
    """Say that this task's preparations are done, and wait until it is told to work."""
    answer.send(PREPARED)
    answer.recv()


@dataclass
class _Process:
    """The process of one task, and this end of its pipe."""

    key: str
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
            return {self.key: self.name, "outcome": "out of time", "reason": reason}
        except EOFError:
            self.process.join(5)
            reason = f"its process ended with {self.process.exitcode}"
            return {self.key: self.name, "outcome": "failed", "reason": reason}


def cell(text: str) -> str:
    """Text in one cell of a table of a page."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def machine() -> str:
    """The processor's name and the vector instructions that PyTorch uses."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    name = re.search(r"model name\s*: (.*)", text)
    flags = re.search(r"flags\s*: (.*)", text)
    wide = [
        f for f in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if flags and f in flags[1].split()
    ]
    said: Any = (name[1].strip() if name else platform.processor() or platform.machine(), *wide)
    return f"{', '.join(said)} (PyTorch uses {torch.backends.cpu.get_cpu_capability()})"
