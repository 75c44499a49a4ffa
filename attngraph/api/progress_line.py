"""A line on the terminal while a model compiles, so that a long compilation is not taken for a hang.

It appears after a second, tells the stage and the time, and is erased at the end. Nothing is written where
standard error is no terminal (a log, a notebook, a test), or where the caller shows progress of its own.
"""

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator

from attngraph.api.options import Options

SILENT = 1.0
"""Seconds before the line appears; it is written again as often."""


@contextlib.contextmanager
def progress_line(options: Options) -> Iterator[Options]:
    """The options to compile with, and the line while it lasts."""
    if options.progress is not None or sys.stderr is None or not sys.stderr.isatty():
        yield options
        return
    line = _Line()
    try:
        yield dataclasses.replace(options, progress=line)
    finally:
        line.end()


class _Line(threading.Thread):
    """Called with the name of each stage as it starts."""

    def __init__(self) -> None:
        super().__init__(name="attngraph progress", daemon=True)
        self.began = time.perf_counter()
        self.stage, self.ended, self.written = "", threading.Event(), False
        self.start()

    def __call__(self, stage: str) -> None:
        self.stage = stage

    def run(self) -> None:
        while not self.ended.wait(SILENT):
            seconds = time.perf_counter() - self.began
            self._write(f"attngraph compiles: {seconds:.0f} s, {self.stage}")

    def end(self) -> None:
        self.ended.set()
        self.join()
        if self.written:
            self._write("")

    def _write(self, text: str) -> None:
        """Write over the line; a terminal that is gone is no reason to fail."""
        with contextlib.suppress(OSError, ValueError):
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self.written = True
