"""Whether a model runs a loop over tokens, found without a trace.

A trace with symbolic sizes stops where it comes to such a loop, and what it did until then is lost. That may
be long after it began: the steps before the loop compute with quotients of the number of tokens, which torch
compares for seconds. So the call is run on tensors without data, for few tokens and for many, and its
operations are counted. Used by `trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.capture.first_call import without_data
from attngraph.capture.structure import flatten, unflatten

MANY = 4099
"""More tokens than a chunk or a block has; a prime number, so that chunks do not divide it."""
TIMES = 2
"""A loop over tokens is taken to run where so many tokens take more than so many times the operations."""


class _TooMany(Exception):
    """More operations than were asked for."""


class _Counted(TorchDispatchMode):
    """Counts operations up to a limit (0: none), and notes the extents of what they give."""

    def __init__(self, limit: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.limit, self.extents = 0, limit, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.limit and self.count > self.limit:
            raise _TooMany
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            self.extents.update(value.shape if isinstance(value, Tensor) else ())
        return result


def extents_of_loop(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    tokens: Collection[tuple[int, int]],
) -> frozenset[int] | None:  # fmt: skip
    """The extents of what the operations of a call give, if there are many more operations for many tokens;
    None if there are not, or if that cannot be told. Operations after one that needs data do not count.

    Args:
        tokens: the dimensions, (tensor argument, dimension), that count the tokens.
    """
    few = _operations(target, args, kwargs)
    more = _operations(target, *_with_many(args, kwargs, tokens), limit=TIMES * few.count)
    return frozenset(few.extents) if more.count > more.limit > 0 else None


def _operations(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], limit: int = 0
) -> _Counted:
    counted = _Counted(limit)
    try:
        with without_data(target, args, kwargs) as run, torch.no_grad(), counted:
            run()
    except Exception:  # it may need data, or take no so many tokens
        pass
    return counted


def _with_many(
    args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Collection[tuple[int, int]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for many tokens: extents that are equal to the number of tokens count them too."""
    leaves, spec = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    counts = {tensors[place].shape[dim] for place, dim in tokens}

    def longer(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or counts.isdisjoint(leaf.shape):
            return leaf
        return leaf.new_zeros([MANY if n in counts else n for n in leaf.shape])

    return unflatten([longer(leaf) for leaf in leaves], spec)  # type: ignore[no-any-return]
