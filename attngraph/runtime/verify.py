"""Compares a compiled model's results with those of the eager model.

By the flash-attention rule: the error against the float64 model is at most twice the eager model's, plus
rounding, with NaN and infinities in the same places.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.capture.structure import flatten
from attngraph.meaning.check import comparison
from attngraph.meaning.check.comparison import FLASH, Comparison
from attngraph.meaning.check.oracle import Oracle


@dataclasses.dataclass(frozen=True)
class Agreement(Comparison):
    """The largest errors of the compiled and of the eager model against float64, and the largest value, over
    all results."""

    def __str__(self) -> str:
        verdict = "equal to eager" if self.holds else "NOT equal to eager"
        if self.problem:
            return f"{verdict}: {super().__str__()}"
        return (
            f"{verdict}: largest distance from the float64 answer {self.error:.1e}, eager's own "
            f"{self.eager_error:.1e} (values up to {self.scale:.1f})"
        )


def compare(
    compiled: Callable[..., Any],
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Agreement:
    """Run the compiled model, the eager one and its float64 copy on the same inputs, without gradients.

    The model must be deterministic (eval mode, or no dropout).
    """
    kwargs = kwargs or {}
    with torch.no_grad():
        mine = tensors_of(compiled(*args, **kwargs))
        eager = tensors_of(model(*args, **kwargs))
        exact_model = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
        wide_args, wide_kwargs = pytree.tree_map_only(Tensor, Oracle().widened, (args, kwargs))
        exact = tensors_of(exact_model(*wide_args, **wide_kwargs))
    if len(mine) != len(eager):
        return Agreement(
            FLASH, problem="another number of results", detail=f"{len(mine)} instead of {len(eager)}"
        )
    error = eager_error = scale = 0.0
    for place, (a, b, c) in enumerate(zip(mine, eager, exact, strict=True)):
        found = comparison.compare(a, c, FLASH, eager=b)
        if found.problem:
            where = f" (result {place})" if len(mine) > 1 else ""
            return Agreement(FLASH, problem=found.problem, detail=found.detail + where)
        error, scale = max(error, found.error), max(scale, found.scale)
        eager_error = max(eager_error, found.eager_error)
    return Agreement(FLASH, error, scale, eager_error)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors in what a model returns, in order."""
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
