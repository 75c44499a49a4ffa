"""Which graph serves a call of a compiled model, or the model itself: fingerprints, the graphs kept (where
none serves a call, it is told why), calls that are too small for any graph, or that the model is faster at.

Where it may be near, the first calls of each size are timed by turns. No call is made to be measured: each
answers one of the user's, as both can. The graph's first call compiles, and is not counted. What took less
time serves from then on. Where one is far ahead after a turn of each, the other gets no second one.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence, ValuesView
from typing import Any

from torch import Tensor

from attngraph.capture.guards import change_between, change_of_sizes
from attngraph.capture.state.fingerprint import Fingerprint, Reads, RecordingWalk, Taken, fingerprint
from attngraph.capture.state.scope import Scope
from attngraph.ir import budgets
from attngraph.runtime.executable import Executable

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


log = logging.getLogger(__name__)
KeyOf = Callable[[Scope], Any]
"""Gives a call's key in a scope."""


class Graphs:
    """Executables by the calls that they serve. A graph depends on what the code that its trace ran can read
    (`captured.scope`), so it is kept under `key_of(scope)`, where `key_of` gives a call's key
    (`capture.guards.call_key`) in a scope."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[Any, list[Executable]] = collections.OrderedDict()
        self.retraces: collections.Counter[str] = collections.Counter()
        """Why calls were traced again, and how often."""

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def values(self) -> ValuesView[list[Executable]]:
        return self._kept.values()

    def latest(self) -> Executable | None:
        """The graph that was traced last."""
        return next(reversed(self._kept.values()))[-1] if self._kept else None

    def find(self, key_of: KeyOf, tensors: Sequence[Tensor]) -> Executable | None:
        """The graph that serves a call with these tensors."""
        for scope in dict.fromkeys(scope for scope, _ in reversed(self._kept)):
            for executable in reversed(self._kept.get((scope, key_of(scope)), ())):
                if executable.accepts(tensors):
                    return executable
        return None

    def keep(self, key_of: KeyOf, found: Executable) -> None:
        """Keep a graph, and drop the least recently used one if there are too many."""
        scope = found.captured.scope
        key = scope, key_of(scope)
        self._kept.setdefault(key, []).append(found)
        self._kept.move_to_end(key)
        while len(self) > budgets.GRAPHS_KEPT:
            oldest = next(iter(self._kept))
            self._kept[oldest].pop(0)
            if not self._kept[oldest]:
                del self._kept[oldest]

    def tell_why(
        self, key_of: KeyOf, scope: Scope, model: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]
    ) -> None:
        """Count, and log, why none of the graphs serves a call; warn where one cause keeps coming."""
        key = key_of(scope)
        same = [known for other, known in reversed(self._kept) if other == scope]
        if not same:
            return
        nearest = min(same, key=lambda known: sum(a != b for a, b in zip(known, key, strict=True)))
        found = change_between(nearest, key, model, leaves, scope)
        if found is None:
            found = change_of_sizes([g.sizes for g in self._kept.get((scope, key), ())], tensors)
        self.retraces[found.what] += 1
        count = self.retraces[found.what]
        log.info("traced again because of %s", found)
        if count == budgets.RETRACES_TOLD:
            log.warning(
                "traced again for the %dth time because of %s. Each change of it takes a trace, and at most "
                "%d graphs are kept. What to do: %s.",
                count, found, budgets.GRAPHS_KEPT, found.advice,
            )  # fmt: skip


class SmallCalls:
    """The shapes of calls that run the model itself, and how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self._shapes: set[Any] = set()

    def __contains__(self, shapes: Any) -> bool:
        return shapes in self._shapes

    def add(self, shapes: Any) -> None:
        self.count += 1
        if len(self._shapes) >= budgets.SMALL_CALLS_KEPT:
            self._shapes.clear()
        self._shapes.add(shapes)


TURNS, FAR, LEAST = 2, 1.5, 1.03
"""Calls of each that are timed; a ratio that one turn decides; by how much the model must be ahead."""


@dataclasses.dataclass
class _Timed:
    """What calls of one size took, in seconds, by the graph and by the model."""

    warm: bool = False
    graph: list[float] = dataclasses.field(default_factory=list)
    model: list[float] = dataclasses.field(default_factory=list)
    by_model: bool | None = None

    def decide(self) -> None:
        if not self.model or len(self.model) < len(self.graph):
            return
        graph, model = min(self.graph), min(self.model)
        if len(self.model) == TURNS or graph > FAR * model or model > FAR * graph:
            self.by_model = graph > LEAST * model


class Paces:
    """Who serves the calls of each size: `key` tells sizes apart."""

    def __init__(self) -> None:
        self._of: dict[Any, _Timed] = {}

    def serve(self, key: Any, graph: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """The result of a call, from the one or the other."""
        timed = self._of.get(key)
        if timed is None:
            if len(self._of) >= budgets.SMALL_CALLS_KEPT:
                self._of.clear()
            timed = self._of[key] = _Timed()
        if timed.by_model is not None:
            return model() if timed.by_model else graph()
        if not timed.warm:
            timed.warm = True
            return graph()
        taken, run = (timed.model, model) if len(timed.graph) > len(timed.model) else (timed.graph, graph)
        start = time.perf_counter()
        result = run()
        taken.append(time.perf_counter() - start)
        timed.decide()
        return result

    @property
    def is_deciding(self) -> bool:
        """Whether calls of some size are still timed."""
        return any(timed.by_model is None for timed in list(self._of.values()))

    def slower(self) -> tuple[tuple[float, float], ...]:
        """The times of graph and model, in milliseconds, of sizes at which the model itself serves."""
        found = (t for t in list(self._of.values()) if t.by_model)
        return tuple((1e3 * min(t.graph), 1e3 * min(t.model)) for t in found)
