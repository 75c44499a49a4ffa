"""Fingerprints of a model's state that are taken again only where something they depend on has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attngraph.capture.state.fingerprint import Fingerprint, Taken, fingerprint
from attngraph.capture.state.scope import Scope
from attngraph.capture.state.unchanged import Reads, RecordingWalk
from attngraph.ir import budgets

_LONGEST_PAUSE = 64
_KEPT = 2 * budgets.GRAPHS_KEPT


class Fingerprints:
    """The fingerprints of one target, a module or a function.

    Every walk but the first records what it reads, and serves until something of that changes. Where records
    keep turning out stale, as for a model that sets an attribute to a new object in every call, more and more
    walks without a record come between.
    """

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._known: dict[Scope, tuple[Taken, Reads | None]] = {}
        self._earlier: dict[Taken, Taken] = {}
        """Equal ones are one object, so that keys with them are compared at once."""
        self._pause = self._wait = 0

    def __call__(self, things: Sequence[Any], scope: Scope) -> Taken:
        """`capture.state.fingerprint.fingerprint` of the target and of these things, in a scope."""
        if things:
            return fingerprint([self._target, *things], scope)
        found, reads = self._known.get(scope, (None, None))
        if found is not None and reads is not None and reads.hold():
            self._pause //= 2
            return found
        if reads is not None:
            self._pause = self._wait = min(2 * self._pause + 1, _LONGEST_PAUSE)
        records = found is not None and self._wait == 0
        self._wait = max(self._wait - 1, 0)
        walk = RecordingWalk(scope) if records else Fingerprint(scope)
        walk.everything([self._target])
        taken = Taken(walk.found)
        taken = self._earlier.setdefault(taken, taken)
        self._known.pop(scope, None)
        self._known[scope] = taken, getattr(walk, "reads", None)
        for kept in (self._earlier, self._known):
            while len(kept) > _KEPT:
                kept.pop(next(iter(kept)))  # type: ignore[call-overload]
        return taken
