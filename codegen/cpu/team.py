"""Running a C function on as many threads as PyTorch uses.

Where PyTorch uses GNU OpenMP, its thread team runs the function: GOMP's entry point is a plain function, so
no second OpenMP is loaded, and threads that still spin after PyTorch's last loop start at once. Elsewhere
Python's threads run it; ctypes releases the interpreter's lock during the call.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run(function: Any, argument: ctypes.Structure | ctypes.Array[Any], members: int) -> None:
    """Call `function(&argument)` on `members` threads in parallel, and wait for all."""
    address = ctypes.byref(argument)
    start = _start()
    if members == 1:
        function(address)
    elif start is not None:
        start(function, address, members, 0)
    else:
        list(_pool(members).map(function, [address] * members))


@functools.cache
def _start() -> Any:
    """GNU OpenMP's `GOMP_parallel`, if PyTorch loaded it into the process's global symbols."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if found is not None:
        found.restype = None
        found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return found


@functools.cache
def _pool(members: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(members, thread_name_prefix="attngraph")
