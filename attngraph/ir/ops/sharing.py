"""What operations may keep for each other: within one run of a graph, or one backward pass.

What follows from a tensor's values holds until somebody writes to it, and torch does not count every write: a
kernel of the user's, a CUDA graph that is replayed and `.data` leave the version as it is. While a graph runs
(`runtime/machine.py`) nothing but its operations computes, and these write to none of their inputs; in a
backward pass autograd relies on the same. Anywhere else nothing is kept from one operation to the next.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_local = threading.local()


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """The operations that this thread calls inside are those of one run of a graph."""
    outer: dict[Any, Any] | None = getattr(_local, "run", None)
    try:
        _local.run = {}
        yield
    finally:
        _local.run = outer


def shared() -> dict[Any, Any] | None:
    """What the operations of this run, or of this backward pass, keep for each other; None outside."""
    run: dict[Any, Any] | None = getattr(_local, "run", None)
    if run is not None:
        return run
    task = torch._C._current_graph_task_id()
    if task == -1:
        return None
    known: tuple[int, dict[Any, Any]] | None = getattr(_local, "backward", None)
    if known is None or known[0] != task:
        known = _local.backward = task, {}
    return known[1]
