"""Why something that looks like attention is left alone: a value, handed up to the report."""

from __future__ import annotations

import dataclasses
import re

_THINGS = re.compile(
    r"(an? |the (place|mask) of |several |padding |differences |integers |elements |truth values |values of )"
)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`sizes` are symbolic sizes that cause it: with numbers in their place it might be recognised."""

    reason: str
    sizes: frozenset[str] = frozenset()


def stands_between(problem: str) -> str:
    """What keeps an element from being followed, as the reason why the softmax before it is left alone."""
    if _THINGS.match(problem) is None:
        return problem  # a sentence of its own
    return f"between its scores and the sum of its values stands {problem}, which is not looked into"
