"""Why something that looks like attention is left alone: a value, handed up to the report."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`sizes` are symbolic sizes that cause it: with numbers in their place it might be recognised."""

    reason: str
    sizes: frozenset[str] = frozenset()
