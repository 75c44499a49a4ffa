"""Tensors that depend on no input are known, and only those."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from attngraph.capture.trace import capture
from attngraph.meaning.constants import ConstantFolding


def triangle_in_a_loop(x: Tensor) -> Tensor:
    mask = torch.zeros(6, 6)
    for row in range(6):
        mask[row, row + 1 :] = -1e9
    return mask


def entry_by_entry(x: Tensor) -> Tensor:
    mask = torch.empty(4, 4, dtype=torch.bool)
    for row in range(4):
        for column in range(4):
            mask[row, column] = column <= row
    return mask


def like_the_input(x: Tensor) -> Tensor:
    mask = x.new_zeros(5, 5)
    mask[2] = 1
    return mask + torch.full_like(mask, 3)


def by_indices(x: Tensor) -> Tensor:
    rows, columns = torch.tril_indices(5, 5)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[rows, columns] = True
    return mask


def of_blocks(x: Tensor) -> Tensor:
    return torch.block_diag(torch.ones(2, 3), torch.ones(2, 3))


def random_numbers(x: Tensor) -> Tensor:
    return torch.rand(4, 4) > 0.5


def from_the_input(x: Tensor) -> Tensor:
    return torch.ones(4, 4).tril() * x.sum()


def from_a_size(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], x.shape[0]).tril()


def not_all_written(x: Tensor) -> Tensor:
    mask = torch.empty(4, 4)
    mask[:3] = 1
    return mask


def nodes_of(function: Callable[[Tensor], Tensor]) -> tuple[ConstantFolding, fx.Node]:
    graph = capture(function, (torch.randn(6, 3),), {}).graph
    (result,) = graph.graph.output_node().args[0]
    return ConstantFolding(graph.known_values()), result


@pytest.mark.parametrize(
    "function", [triangle_in_a_loop, entry_by_entry, like_the_input, by_indices, of_blocks]
)
def test_what_depends_on_no_input_is_known(function: Callable[[Tensor], Tensor]) -> None:
    known, node = nodes_of(function)
    found = known.values(node)
    assert found is not None and torch.equal(found, function(torch.zeros(6, 3)))


@pytest.mark.parametrize("function", [random_numbers, from_the_input, from_a_size, not_all_written])
def test_what_differs_from_call_to_call_is_not(function: Callable[[Tensor], Tensor]) -> None:
    known, node = nodes_of(function)
    assert known.values(node) is None
