"""What rounding does to a side: to which dtypes it rounds; numbers moved to see how far that goes."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.api.calls import tensors_in
from attngraph.api.recorded import stack_of


class Narrowest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meets what a call computes. `unit`: the last place of the narrowest dtype to which it rounds, first at
    `line`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit, self.line = 0.0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        units = units_of(tensors_in((args, kwargs, result)))
        # it rounds to, or computes with what was rounded to, a narrower one
        if units and min(units) < max(units) > self.unit:
            stack = stack_of(sys._getframe(1))
            self.unit, self.line = max(units), stack[-1].line if stack else ""
        return result


def units_of(tensors: Iterable[Tensor]) -> list[float]:
    """The last places of the floating ones, for numbers near 1."""
    return [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()]


def nudged(tensor: Tensor, by: float) -> Tensor:
    """Each number moved by at most so much, relatively."""
    return tensor * (1 + by * (2 * torch.rand_like(tensor) - 1)) if by else tensor


@contextlib.contextmanager
def moved(weights: Iterable[Tensor], by: float) -> Iterator[None]:
    """Within, weights are moved by a relative amount."""
    before = [(w, w.detach().clone()) for w in weights] if by else []
    for weight, _ in before:
        weight.data = nudged(weight.data, by)
    try:
        yield
    finally:
        for weight, data in before:
            weight.data = data


@contextlib.contextmanager
def scaled(weights: Iterable[Tensor], by: float) -> Iterator[None]:
    """Within, matrices are so many times as large."""
    before = [(w, w.data) for w in set(weights) if by != 1.0 and w.ndim > 1 and w.is_floating_point()]
    for weight, data in before:
        weight.data = data * by
    try:
        yield
    finally:
        for weight, data in before:
            weight.data = data
