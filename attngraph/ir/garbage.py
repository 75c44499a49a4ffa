"""Python's search for unreachable objects, put off where many objects are made that stay.

Python looks each time that some thousands of objects were made, at all objects that are there; a process that
has loaded torch has hundreds of thousands.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let Python look for unreachable objects after the body only."""
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
