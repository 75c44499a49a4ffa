"""A triangular inverse that a loop writes row by row becomes one operation; other loops of writes do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph


class Rows(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.write = nn.Linear(8, 8), write

    def forward(self, x: Tensor) -> Tensor:
        k = self.project(x)
        return self.write(k @ k.mT) @ x


def _below(a: Tensor, diagonal: int = -1) -> Tensor:
    return -a.tril(diagonal)


def _substituted(a: Tensor) -> Tensor:
    """As in transformers' delta rules."""
    for i in range(1, a.shape[-1]):
        row, before = a[..., i, :i].clone(), a[..., :i, :i].clone()
        a[..., i, :i] = row + (row.unsqueeze(-1) * before).sum(-2)
    return a


def _by_products(a: Tensor) -> Tensor:
    for i in range(1, a.shape[-1]):
        a[..., i, :] = a[..., i, :] + (a[..., i, None, :] @ a)[..., 0, :]
    return a


def _whole_slices(a: Tensor) -> Tensor:
    for i in range(1, a.shape[-1]):
        a[..., i : i + 1, :] = a[..., i : i + 1, :] + a[..., i : i + 1, :i] @ a[..., :i, :]
    return a


def _twice(a: Tensor) -> Tensor:
    for i in range(1, a.shape[-1]):
        a[..., i, :] = a[..., i, :] + 2 * (a[..., i, None, :] @ a)[..., 0, :]
    return a


def _all_but_the_last(a: Tensor) -> Tensor:
    for i in range(1, a.shape[-1] - 1):
        a[..., i, :] = a[..., i, :] + (a[..., i, None, :] @ a)[..., 0, :]
    return a


def _from_the_old_rows(a: Tensor) -> Tensor:
    old = a.clone()
    for i in range(1, a.shape[-1]):
        a[..., i, :] = a[..., i, :] + (old[..., i, None, :] @ old)[..., 0, :]
    return a


JOINED = {
    "row by row": lambda a: _substituted(_below(a)),
    "by products of matrices": lambda a: _by_products(_below(a)),
    "slices of one row": lambda a: _whole_slices(_below(a)),
    "masked": lambda a: _by_products(a.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(), 0.0)),
}
LEFT = {
    "another factor": lambda a: _twice(_below(a)),
    "a row fewer": lambda a: _all_but_the_last(_below(a)),
    "rows of the old matrix": lambda a: _from_the_old_rows(_below(a)),
    "a matrix with a diagonal": lambda a: _substituted(_below(a, 0)),
    "a matrix that is full": lambda a: _substituted(a + 0),
}


def _notes(model: nn.Module, x: Tensor) -> str:
    compiled = attngraph.compile(model)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    return " ".join(note for record in compiled.report.passes for note in record.notes)


@pytest.mark.parametrize("name", JOINED)
def test_forward_substitution_is_one_operation(name: str) -> None:
    assert "triangular system" in _notes(Rows(JOINED[name]).eval(), torch.randn(2, 6, 8) / 4)


@pytest.mark.parametrize("name", LEFT)
def test_other_writes_of_rows_are_left_alone(name: str) -> None:
    assert "triangular system" not in _notes(Rows(LEFT[name]).eval(), torch.randn(2, 6, 8) / 4)
