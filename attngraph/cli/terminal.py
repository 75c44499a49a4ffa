"""What a command tells its user: progress on standard error, and in one line what makes it unusable."""

import sys
import time
from pathlib import Path

from attngraph.errors import first_line


class TargetError(Exception):
    """A target, or another argument of a command, that cannot be used."""


def check_writable(path: Path | None, option: str) -> None:
    """Check, before any work is done, that a file can be written. TargetError where its folder does not
    exist, or it is a folder itself."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise TargetError(f"{option}: cannot write {path}: there is no folder {path.parent}.")
    if path.is_dir():
        raise TargetError(f"{option}: cannot write {path}: that is a folder.")


def told(problem: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    kind, line = type(problem).__name__, first_line(problem)
    return kind if line == kind else f"{kind}: {line}"


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
        shown, end = (f"\r\x1b[K{text}", "") if self.live else (text, "\n")
        print(shown, end=end, file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
