"""What a backend raises for a program that it cannot emit."""

from __future__ import annotations


class UnsupportedError(Exception):
    """A program cannot be emitted; the message says what is unsupported, for `refuse`."""
