"""Programs are made functional without a second trace where that is safe, and by torch where it is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.testing import assert_close

import attngraph
from attngraph.capture.instead import replaced


def adds_to_its_own(x: Tensor) -> Tensor:
    y = x @ x.mT
    y += 1
    y.mul_(2).masked_fill_(y > 3, 0.5)
    return y.flatten()


def writes_to_the_only_view(x: Tensor) -> Tensor:
    y = (x * 2).unflatten(0, (2, -1))
    y += x[0, 0]
    return y.mT.chunk(2, -1)[0]


def copies_a_constant(x: Tensor) -> Tensor:
    return x.index_fill(0, torch.tensor([1]), 0.0)


def reads_what_a_view_wrote(x: Tensor) -> Tensor:
    y = x * 2
    y[0].add_(1)
    return y


def reads_a_view_after_the_write(x: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    y.add_(1)
    return y + row


def writes_to_parts_of_views(x: Tensor) -> Tensor:
    y = x * 2
    before = y.mT[1:, ::2]
    y.mT[2, 1:] += 7
    y.diagonal().mul_(3)
    y.view(2, 8).unsqueeze(0)[0, 1, 3:5] = before[1, 1]
    y.permute(1, 0)[-1].unsqueeze(1).neg_()
    return y.flatten() + before.sum() + y.mT[0, 0]


def writes_row_after_row(x: Tensor) -> Tensor:
    y = -(x @ x.mT).tril(-1)
    for row in range(1, 4):
        above = y[..., :row, :row].clone()
        y[..., row, :row] = y[..., row, :row] + (y[..., row, :row, None].clone() * above).sum(-2)
    return y + torch.eye(4)


def writes_to_one_of_several_views(x: Tensor) -> Tensor:
    y = x * 2
    left, right = y.chunk(2, -1)
    left.add_(1)
    return left + right


def reads_another_of_several_views(x: Tensor) -> Tensor:
    y = x * 2
    left, right = y[:, :3].split([1, 2], -1)
    right.add_(1)
    return y + left


def may_share_without_saying_so(x: Tensor) -> Tensor:
    y = x * 2
    z = torch.einsum("ij->ji", y).type_as(x)
    rows, columns = torch.meshgrid(y[0], y[1], indexing="ij")
    y.add_(1)
    return z + y + rows * columns


def writes_to_its_argument(x: Tensor) -> Tensor:
    y = x.to(x.dtype).flatten()
    y.add_(1)
    return x + y[0]


def writes_a_wider_type(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(torch.ones((), dtype=torch.float64) * torch.arange(4.0, dtype=torch.float64))
    return y


@pytest.mark.parametrize(
    ("function", "traces"),
    [
        (adds_to_its_own, 0), (writes_to_the_only_view, 0), (copies_a_constant, 0),
        (reads_what_a_view_wrote, 0), (reads_a_view_after_the_write, 0),
        (writes_to_parts_of_views, 0), (writes_row_after_row, 0), (writes_to_one_of_several_views, 1),
        (reads_another_of_several_views, 1), (may_share_without_saying_so, 0),
        (writes_to_its_argument, 1), (writes_a_wider_type, 1),
    ],
)  # fmt: skip
def test_writes_are_taken_out_and_only_hard_ones_need_another_trace(
    function: Callable[[Tensor], Tensor], traces: int
) -> None:
    given, mine = (torch.randn(4, 4, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    decompose = ExportedProgram.run_decompositions
    with mock.patch.object(
        ExportedProgram, "run_decompositions", autospec=True, side_effect=decompose
    ) as ran:
        compiled = attngraph.compile(function, strict=True)
        found = compiled(mine)
    assert_close(found, function(given), rtol=0, atol=0)
    assert_close(mine, given, rtol=0, atol=0)
    assert ran.call_count == traces


def test_a_size_that_is_marked_static_is_a_number_of_the_graph() -> None:
    compiled = attngraph.compile(lambda x: x.softmax(-1))
    x = torch.randn(3, 5)
    torch._dynamo.mark_static(x, 1)
    compiled(x)
    compiled(torch.randn(4, 5))
    assert compiled.report.graphs == 1
    compiled(torch.randn(4, 6))
    assert compiled.report.graphs == 2


@pytest.mark.slow
def test_a_torch_without_the_private_names_is_traced_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with replaced(torch, "_no_such_name", 1), replaced("torch.no_such_module", "name", 1):
        assert not hasattr(torch, "_no_such_name")
    monkeypatch.setattr("attngraph.capture.program.functional.replaced", lambda *_: contextlib.nullcontext())
    x = torch.randn(4, 4)
    for function in (adds_to_its_own, writes_to_the_only_view):
        assert_close(attngraph.compile(function)(x), function(x))
