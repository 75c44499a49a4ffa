"""A lock between calls and traces in several threads.

torch.export replaces a model's weights by fake tensors while it traces, and checking a traced graph changes
process-wide settings, so no call may run meanwhile. Any number of calls run concurrently; a trace waits for
them, and new calls wait until it is done. The lock is taken to trace in `build.py`, `derive.py`, `bisect.py`
and `convert.py` of `api/`, and to call in `runtime/machine.py`. A model that is called directly cannot wait:
it must not be called while another thread traces it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class TraceLock:
    """A reader-writer lock: calls share it, a trace holds it exclusively. It is reentrant: the tracing thread
    may trace and call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[int, int] = {}
        self._tracer: int | None = None
        self._waiting = 0  # threads that want to trace: no new call overtakes them
        self.begun = 0
        """Traces that have begun; two equal counts, and no trace at the second, had none in between."""

    def is_tracing(self) -> bool:
        return self._tracer is not None

    def traces_here(self) -> bool:
        """Whether the current thread is the one that traces."""
        return self._tracer == threading.get_ident()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    me in self._calls or self._tracer == me or (self._tracer is None and not self._waiting)
                )
            )
            self._calls[me] = self._calls.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._calls[me] -= 1
                if not self._calls[me]:
                    del self._calls[me]
                self._changed.notify_all()

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            outer = self._tracer == me
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._tracer in (None, me) and not set(self._calls) - {me})
            finally:
                self._waiting -= 1
            self._tracer = me
            self.begun += 1
        try:
            yield
        finally:
            if not outer:
                with self._changed:
                    self._tracer = None
                    self._changed.notify_all()


LOCK = TraceLock()
"""One lock for all models, because they may share weights."""
