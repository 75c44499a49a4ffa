"""Yes-or-no arguments that follow from sizes, such as `is_causal=tokens > 1`, during a trace.

torch's attention takes a bool there, and no symbolic one. The comparison is decided for the sizes of the
example; that it holds becomes a condition of the graph, as where Python branches on a size. Used by
`trace.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from attngraph.capture.instead import replaced

_PLACES: tuple[Any, ...] = (F, torch._C._nn)


@contextlib.contextmanager
def flags_of_sizes() -> Iterator[None]:
    """Let torch's attention take symbolic comparisons of sizes as flags."""
    with contextlib.ExitStack() as stack:
        for place in _PLACES:
            name = "scaled_dot_product_attention"
            stack.enter_context(replaced(place, name, _decided(getattr(place, name))))
        yield


def _decided(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    return run


def _plain(value: Any) -> Any:
    return bool(value) if isinstance(value, torch.SymBool) else value
