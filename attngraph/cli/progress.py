"""Progress messages on standard error."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line on standard error with the current stage; if that is no terminal, a line per stage, at most
    one in `every` seconds."""

    def __init__(self, every: float = 0.0) -> None:
        self.start = self.last = time.perf_counter()
        self.live = sys.stderr.isatty()
        self.every = every

    def __call__(self, stage: str) -> None:
        if not self.live and time.perf_counter() - self.last < self.every:
            return
        self.last = time.perf_counter()
        text = f"[{time.perf_counter() - self.start:6.1f} s] {stage} ..."
        print(
            f"\r\x1b[K{text}" if self.live else text,
            end="" if self.live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def done(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
