"""Gives every task of a benchmark a process with a time limit, and keeps the rows in a file.

A row that the file has already is not computed again, so a run that was cut off goes on. The processes are
copies of one that has imported what all of them need.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self.preload])
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=self.work, args=(name, theirs))
        process.start()
        theirs.close()
        try:
            if mine.poll(limit):
                row: Row = mine.recv()
                return row
            return {self.key: name, "outcome": "out of time", "reason": f"longer than {limit:.0f} s"}
        except EOFError:
            process.join(5)
            reason = f"its process ended with {process.exitcode}"
            return {self.key: name, "outcome": "failed", "reason": reason}
        finally:
            process.kill()
            process.join()


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
