"""Calls of a model with one sequence at a time, for code that goes through the batch in Python.

`for b in range(x.shape[0])` is traced as often as the example has sequences, and the graph is then of that
number. A decoder treats each sequence by itself anyway, so the model may be called with one sequence, and
`torch.vmap` makes a batch of such calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from attngraph.capture.structure import TreeSpec, flatten, unflatten

_ALONE: ContextVar[bool] = ContextVar("_ALONE", default=False)


@contextlib.contextmanager
def sequences_alone() -> Iterator[None]:
    """Within the context, a trace calls its target with one sequence at a time. The call has one tensor."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def call(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The target's result for these arguments."""
    if not _ALONE.get():
        return target(*args, **kwargs)
    leaves, spec = flatten((args, kwargs))
    (tokens,) = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    trees: list[tuple[list[Any], TreeSpec]] = []

    def of_one(row: Tensor) -> tuple[Tensor, ...]:
        own, named = unflatten([row[None] if leaf is tokens else leaf for leaf in leaves], spec)
        results, tree = flatten(target(*own, **named))
        trees.append((results, tree))
        return tuple(leaf.squeeze(0) for leaf in results if isinstance(leaf, Tensor))

    tensors = iter(torch.vmap(of_one)(tokens))
    results, tree = trees[-1]
    return unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in results], tree)
