"""Calls and traces from several threads.

torch.export swaps a model's weights for fakes while it traces, and checking what was traced changes settings
of the whole process, so no call may run meanwhile. Any number of calls run at once; a trace waits for them
and keeps new ones waiting until it is done. Whatever traces holds the lock (`api/build.py`,
`api/convert.py`), and so does whatever calls (`runtime/machine.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class TraceLock:
    """Calls share it, a trace has it alone. A thread that traces may trace and call inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[int, int] = {}
        self._tracer: int | None = None

    def is_tracing(self) -> bool:
        return self._tracer is not None

    def traces_here(self) -> bool:
        """Whether this thread is the one that traces."""
        return self._tracer == threading.get_ident()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._tracer in (None, me) or me in self._calls)
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
            self._changed.wait_for(lambda: self._tracer in (None, me) and not set(self._calls) - {me})
            self._tracer = me
        try:
            yield
        finally:
            if not outer:
                with self._changed:
                    self._tracer = None
                    self._changed.notify_all()


LOCK = TraceLock()
"""One for all models: they may share weights."""
