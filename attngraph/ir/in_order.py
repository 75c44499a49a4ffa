"""Choices among equal numbers, made in one order: of equal ones the first.

Torch's own depend on how many there are beside them. Where two computations are compared that see the same
numbers among more or fewer others, both choose so.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _topk(
    value: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The largest few, of equal ones the first."""
    if not value.ndim:
        return value.topk(k, dim, largest, sorted)
    found, places = value.sort(dim=dim, descending=largest, stable=True)
    return found.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


def _sort(value: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return value.sort(dim=dim, descending=descending, stable=True)


IN_ORDER: dict[Any, Callable[..., Any]] = {
    aten.topk.default: _topk, aten.sort.default: _sort,
    aten.argsort.default: lambda *args, **kwargs: _sort(*args, **kwargs)[1],
}  # fmt: skip
"""What is called instead, where equal numbers must have one order."""


class InOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Under which equal numbers have one order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return IN_ORDER.get(func, func)(*args, **(kwargs or {}))
