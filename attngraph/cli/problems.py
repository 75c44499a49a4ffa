"""What makes a command unusable, told in one line with exit code 2."""

from __future__ import annotations

from pathlib import Path


class TargetError(Exception):
    """A target, or another argument of a command, that cannot be used."""


def check_writable(path: Path | None, option: str) -> None:
    """Check, before any work is done, that a file can be written.

    Raises:
        TargetError: its folder does not exist, or it is a folder itself.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise TargetError(f"{option}: cannot write {path}: there is no folder {path.parent}.")
    if path.is_dir():
        raise TargetError(f"{option}: cannot write {path}: that is a folder.")


def first_line(problem: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    text = next((line.strip() for line in str(problem).splitlines() if line.strip()), "")
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
