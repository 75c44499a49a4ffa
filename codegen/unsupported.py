"""What a backend raises for a program that it does not know how to write."""

from __future__ import annotations


class UnsupportedError(Exception):
    """A program that is not written as source; the message says what, for `refuse`."""
