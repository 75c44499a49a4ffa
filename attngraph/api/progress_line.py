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
    ended, began, stages = threading.Event(), time.perf_counter(), [""]

    def write(text: str) -> None:
        """Write over the line; a terminal that is gone is no reason to fail."""
        with contextlib.suppress(OSError, ValueError):
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def run() -> None:
        written = False
        while not ended.wait(SILENT):
            write(f"attngraph compiles: {time.perf_counter() - began:.0f} s, {stages[-1]}")
            written = True
        if written:
            write("")

    line = threading.Thread(target=run, name="attngraph progress", daemon=True)
    line.start()
    try:
        yield dataclasses.replace(options, progress=stages.append)
    finally:
        ended.set()
        line.join()
