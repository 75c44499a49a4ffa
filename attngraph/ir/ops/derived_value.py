"""A value that one computation gives, with the derivatives of another one of the same function."""

from typing import Any

import torch
from torch import Tensor


class WithValue(torch.autograd.Function):
    """One tensor's value with another's gradient."""

    @staticmethod
    def forward(ctx: Any, differentiable: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
