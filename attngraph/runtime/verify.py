"""Does a compiled model answer as the eager one does? The comparison that people ask for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.capture.structure import flatten

SLACK = 1e-6
"""Added to the bound, relative to the largest value: rounding where eager happens to be exact."""

ROUNDINGS = 64
"""Units in the last place of the largest value by which two answers may differ where neither can be held to
an exact one."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far a compiled model is from the exact answer, beside how far the eager one is.

    `error` and `eager_error` are the largest distances from the float64 model; `scale` is the largest
    absolute value of the exact answer. `holds` is the flash-attention rule: error at most twice the
    eager one's plus `SLACK * scale`, with the same NaN and infinity patterns.
    """

    error: float
    eager_error: float
    scale: float
    problem: str = ""

    @property
    def holds(self) -> bool:
        return not self.problem and self.error <= 2 * self.eager_error + SLACK * self.scale

    def __str__(self) -> str:
        verdict = "equal to eager" if self.holds else "NOT equal to eager"
        if self.problem:
            return f"{verdict}: {self.problem}"
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
    """Run the compiled model, the eager one and its float64 copy on the same inputs.

    The model must be deterministic (eval mode, or no dropout). No gradients.
    """
    kwargs = kwargs or {}
    with torch.no_grad():
        mine = _tensors(compiled(*args, **kwargs))
        eager = _tensors(model(*args, **kwargs))
        exact_model = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
        wide_args, wide_kwargs = pytree.tree_map(_widened, (args, kwargs))
        exact = _tensors(exact_model(*wide_args, **wide_kwargs))
    if [t.shape for t in mine] != [t.shape for t in eager]:
        return Agreement(0, 0, 0, "the results differ in number or shape")
    if [t.dtype for t in mine] != [t.dtype for t in eager]:
        return Agreement(0, 0, 0, "the results differ in dtype")
    error = eager_error = scale = 0.0
    for a, b, c in zip(mine, eager, exact, strict=True):
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return Agreement(0, 0, 0, "an integer result differs")
            continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return Agreement(0, 0, 0, "NaN or infinity in one and not in the other")
        if _differ_where_nothing_is_exact(a, b, c):
            return Agreement(0, 0, 0, "it differs from eager where the float64 model gives NaN or infinity")
        error = max(error, _distance(a, c))
        eager_error = max(eager_error, _distance(b, c))
        scale = max(scale, float(c.nan_to_num(0, 0, 0).abs().max()) if c.numel() else 0.0)
    return Agreement(error, eager_error, scale)


def _differ_where_nothing_is_exact(mine: Tensor, eager: Tensor, exact: Tensor) -> bool:
    """Whether the two differ by more than rounding where they are finite and the float64 model's answer is
    not (a fill that only overflows in float64, for one)."""
    places = eager.isfinite() & ~exact.isfinite()
    if not bool(places.any()):
        return False
    a, b = mine[places].double(), eager[places].double()
    return float((a - b).abs().max()) > ROUNDINGS * torch.finfo(eager.dtype).eps * float(b.abs().max())


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _distance(value: Tensor, exact: Tensor) -> float:
    difference = (value.double() - exact.double()).nan_to_num(0, 0, 0).abs()
    return float(difference.max()) if difference.numel() else 0.0
