"""A lock between calls and traces in several threads.

torch.export replaces a model's weights by fake tensors while it traces, and checking a traced graph changes
process-wide settings, so no call may run meanwhile. Any number of calls run concurrently; a trace waits for
them, and new calls wait until it is done. The lock is taken to trace in `build.py`, `derive.py`, `bisect.py`
and `convert.py` of `api/`, and to call in `runtime/machine.py`. A model that is called directly cannot wait:
it must not be called while another thread traces it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator


class TraceLock:
    """A reader-writer lock: calls share it, a trace holds it exclusively. It is reentrant: the tracing thread
    may trace and call. A thread that is interrupted has given back what it took: it is kept under an object
    of its own, inside of the block that gives it back."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: dict[object, int] = {}  # the thread of each
        self._tracer: int | None = None
        self._waiting: dict[object, int] = {}  # who wants to trace: no new call overtakes them
        self.begun = 0
        """Traces that have begun; two equal counts, and no trace at the second, had none in between."""

    def is_tracing(self) -> bool:
        return self._tracer is not None

    def traces_here(self) -> bool:
        """Whether the current thread is the one that traces."""
        return self._tracer == threading.get_ident()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        me, mine = threading.get_ident(), object()
        try:
            with self._changed:
                self._wait(
                    lambda: (
                        me in self._calls.values()
                        or self._tracer == me
                        or (self._tracer is None and not self._waiting)
                    )
                )
                self._calls[mine] = me
            yield
        finally:
            self._calls.pop(mine, None)
            with self._changed:
                self._changed.notify_all()

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        me, mine = threading.get_ident(), object()
        outer = self._tracer == me
        try:
            with self._changed:
                self._waiting[mine] = me
                self._wait(lambda: self._tracer in (None, me) and not set(self._calls.values()) - {me})
                self._tracer = me
                self.begun += 1
                del self._waiting[mine]
            yield
        finally:
            if not outer and self._tracer == me:
                self._tracer = None
            self._waiting.pop(mine, None)
            with self._changed:
                self._changed.notify_all()

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds. It is looked at now and then, as a thread may be interrupted before it
        tells."""
        while not self._changed.wait_for(holds, timeout=1.0):
            pass


LOCK = TraceLock()
"""One lock for all models, because they may share weights."""
