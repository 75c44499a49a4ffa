"""numpy functions of symbolic sizes, such as `np.sqrt(x.shape[-1])`, during a trace.

numpy applies a function to an object of a type that it does not know by calling the object's method of that
name. These methods are added to torch's symbolic sizes and numbers while a trace runs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


def _of_number(size: Any, name: str) -> float:
    value: float = getattr(math, name)(size)
    return value


_FIXING = ["log", "log2", "log10", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"]
"""Functions that torch.export has no symbolic form of: the size becomes a number."""
_METHODS: dict[str, Any] = {
    "sqrt": torch.sym_sqrt,
    "exp": lambda x: math.e**x,
    "floor": lambda x: torch.sym_float(math.floor(x)),
    "ceil": lambda x: torch.sym_float(math.ceil(x)),
    **{name: functools.partialmethod(_of_number, name.replace("arc", "a")) for name in _FIXING},
}


@contextlib.contextmanager
def numpy_of_sizes() -> Iterator[None]:
    """Let numpy's functions of one number take symbolic sizes."""
    with contextlib.ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat):
            for name, function in _METHODS.items():
                stack.enter_context(mock.patch.object(kind, name, function, create=True))
        yield
