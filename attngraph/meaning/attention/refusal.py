"""Why something that looks like attention is left alone: a value, handed up to the report."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`sizes` are the symbolic sizes in the way: were they numbers, it might be understood."""

    reason: str
    sizes: frozenset[str] = frozenset()
