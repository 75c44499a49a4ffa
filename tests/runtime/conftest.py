"""What the tests of the runtime share: small attentions, and equality with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.runtime.look import Unseen


def attend(q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    k = q if k is None else k
    v = k if v is None else v
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


class SelfAttention(nn.Module):
    """One head with a packed projection: x `[B, T, C]` to `[B, T, C]`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.qkv(x).chunk(3, -1))


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Equal structure, dtypes, shapes, NaN patterns, requires_grad, and values up to the tolerance. A tensor
    that is computed when somebody looks at it is as good as a plain one."""
    mine, theirs = pytree.tree_flatten(actual), pytree.tree_flatten(expected)
    assert mine[1] == theirs[1], f"{mine[1]} instead of {theirs[1]}"
    for a, b in zip(mine[0], theirs[0], strict=True):
        assert type(a) is type(b) or type(a) is Unseen, f"{type(a)} instead of {type(b)}"
        if not isinstance(a, Tensor):
            assert repr(a) == repr(b)
            continue
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        largest = float(b.double().nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
        assert torch.allclose(a, b, atol=tolerance * max(1.0, largest), rtol=tolerance, equal_nan=True), (
            f"off by {float((a.double() - b.double()).abs().nan_to_num(0, 0, 0).max())}"
        )


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    return assert_same


@pytest.fixture(scope="session")
def attention() -> Callable[..., Tensor]:
    return attend


@pytest.fixture(scope="session")
def layer() -> type[SelfAttention]:
    return SelfAttention


@pytest.fixture
def x() -> Tensor:
    """`[2, 5, 8]`."""
    return torch.randn(2, 5, 8)
