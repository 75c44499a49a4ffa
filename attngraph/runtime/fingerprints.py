"""Fingerprints of a model's state that are taken again only where something they depend on has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attngraph.capture.state.unchanged import Reads, RecordingWalk
from attngraph.capture.state.walk import LeftOut, Walk, fingerprint

_LONGEST_PAUSE = 64


class Fingerprints:
    """The fingerprints of one target, a module or a function.

    Every walk but the first records what it reads, and serves until something of that changes. Where records
    keep turning out stale, as for a model that sets an attribute to a new object in every call, more and more
    walks without a record come between.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._known: dict[LeftOut, tuple[tuple[Any, ...], Reads | None]] = {}
        self._pause = self._wait = 0

    def __call__(self, things: Sequence[Any], left_out: LeftOut) -> tuple[Any, ...]:
        """`capture.state.walk.fingerprint` of the target and of these things, without some attributes."""
        if things:
            return fingerprint([self._target, *things], left_out=left_out)
        found, reads = self._known.get(left_out, (None, None))
        if found is not None and reads is not None and reads.hold():
            self._pause //= 2
            return found
        if reads is not None:
            self._pause = self._wait = min(2 * self._pause + 1, _LONGEST_PAUSE)
        records = found is not None and self._wait == 0
        self._wait = max(self._wait - 1, 0)
        walk = RecordingWalk(left_out) if records else Walk({}, left_out)
        walk.start(self._target)
        self._known[left_out] = tuple(walk.found), getattr(walk, "reads", None)
        return self._known[left_out][0]
