"""Tensors that depend on no input are known, and only those; the formula that is read out of one gives every
value back, or there is no formula.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from attngraph.capture.trace import capture
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.constants import ConstantFolding, describe


def described(values: Tensor) -> Expr | None:
    return describe(values, indices(values))


def indices(values: Tensor) -> tuple[Expr, ...]:
    return tuple(E.var(f"o{d}", E.const(n)) for d, n in enumerate(values.shape))


def assert_gives_every_value(formula: Expr, values: Tensor, number: Callable[..., Any]) -> None:
    for place in itertools.product(*map(range, values.shape)):
        found = number(formula, dict(zip(indices(values), place, strict=True)), None)
        wanted = values[place].item()
        assert found == wanted or (found != found and wanted != wanted), (place, found, wanted)


NINF = -math.inf
KNOWN: dict[str, Tensor] = {
    "lower triangle": torch.ones(5, 5).tril(),
    "upper triangle": torch.ones(5, 5).triu(1),
    "wide triangle": torch.ones(3, 7).tril(2),
    "tall triangle": torch.ones(7, 3, dtype=torch.bool).tril(-2),
    "band": torch.ones(6, 6).tril(1).triu(-2),
    "additive mask": torch.full((4, 4), NINF).triu(1),
    "finite mask": torch.full((4, 4), -1e9).triu(1),
    "float16 mask": torch.full((4, 4), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1),
    "batched triangle": torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(),
    "identity": torch.eye(4),
    "all but the diagonal": 1 - torch.eye(4),
    "outside a band": (torch.ones(6, 6).tril(1).triu(-1) == 0),
    "range": torch.arange(7),
    "range with a step": torch.arange(3, 30, 4),
    "falling range": torch.arange(5, -3, -2),
    "range of int32": torch.arange(4, dtype=torch.int32),
    "column": torch.arange(4)[:, None],
    "row": torch.arange(4)[None],
    "number": torch.tensor(2.5),
    "truth": torch.tensor(True),
    "zeros": torch.zeros(2, 3, 4),
    "minus infinities": torch.full((3,), NINF),
    "two by two": torch.tensor([[1, 0], [0, 1]]),
    "one row": torch.tensor([[3, 5]]),
    "two": torch.tensor([4, 4]),
    "each twice": torch.tensor([0, 0, 1, 1, 2, 2]),
    "each three times, cut short": torch.tensor([7, 7, 7, 5, 5, 5, 3]),
    "in turn": torch.tensor([0, 1, 2, 0, 1, 2, 0]),
    "in turn, falling, small": torch.tensor([3, 1, 3, 1], dtype=torch.int8),
    "corner": torch.ones(4, 4).tril(-3),
    "other corner": torch.ones(4, 4).triu(3),
    "not contiguous": torch.ones(8, 8).tril()[::2, ::2].mT,
    "uint8": torch.ones(4, 4, dtype=torch.uint8).tril(),
    "bfloat16": torch.full((3, 3), 0.1, dtype=torch.bfloat16),
    "large integers": torch.tensor([2**60, 2**60 + 1, 2**60 + 2]),
    "large flags": torch.tensor([[2**53 + 1, 0], [2**53 + 1, 2**53 + 1]]),
}


@pytest.mark.parametrize("name", list(KNOWN))
def test_triangles_bands_and_ranges_are_described_exactly(name: str, number: Callable[..., Any]) -> None:
    formula = described(KNOWN[name])
    assert formula is not None
    assert not any(n.op == "read" for n in E.walk(formula))
    assert_gives_every_value(formula, KNOWN[name], number)


UNKNOWN: dict[str, Tensor] = {
    "odd entry": torch.ones(4, 4).tril().index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(0.0)),
    "three values": torch.arange(4.0)[:, None].expand(4, 3).tril(),
    "random": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
    "float range": torch.arange(4.0) / 3,
    "broken range": torch.tensor([0, 1, 2, 4]),
    "repeated unevenly": torch.tensor([0, 0, 1, 1, 1, 2]),
    "in turn, broken": torch.tensor([0, 1, 0, 1, 1]),
    "cube": torch.arange(8).view(2, 2, 2),
    "empty": torch.zeros(0, 3),
    "complex": torch.zeros(2, dtype=torch.complex64),
    "all NaN": torch.full((3, 3), math.nan),
    "NaN in the corner": torch.ones(3, 3).index_put(
        (torch.tensor(0), torch.tensor(0)), torch.tensor(math.nan)
    ),
    "NaN triangle": torch.full((3, 3), math.nan).triu(1),
    "NaN on the diagonal": torch.eye(3) * math.nan,
    "NaNs in a row": torch.full((3,), math.nan),
    "one NaN": torch.tensor(math.nan),
    "range that wraps around": torch.tensor([0, 2**62, -(2**63)]),
    "checkerboard": (torch.arange(4)[:, None] + torch.arange(4)) % 2,
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_what_follows_no_pattern_is_refused_or_given_back_exactly(
    name: str, number: Callable[..., Any]
) -> None:
    formula = described(UNKNOWN[name])
    if formula is not None:
        assert_gives_every_value(formula, UNKNOWN[name], number)


@given(data=st.data())
@settings(max_examples=200)
def test_one_odd_entry_never_goes_unseen(data: st.DataObject, number: Callable[..., Any]) -> None:
    rows, columns = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 5))
    low, high = sorted((data.draw(st.integers(-5, 5)), data.draw(st.integers(-5, 5))))
    inside, outside = data.draw(st.permutations([0.0, 1.0, NINF, -1e9]))[:2]
    distance = torch.arange(columns) - torch.arange(rows)[:, None]
    band = torch.where((distance >= low) & (distance <= high), inside, outside)
    whole = described(band)
    assert whole is not None
    assert_gives_every_value(whole, band, number)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    band[row, column] = data.draw(st.sampled_from([inside, outside, 7.0, math.nan]))
    found = described(band)
    if found is not None:
        assert_gives_every_value(found, band, number)


@given(start=st.integers(-50, 50), step=st.integers(-4, 4), count=st.integers(1, 8), data=st.data())
@settings(max_examples=100)
def test_one_odd_number_in_a_range_never_goes_unseen(
    start: int, step: int, count: int, data: st.DataObject, number: Callable[..., Any]
) -> None:
    values = start + step * torch.arange(count)
    formula = described(values)
    assert formula is not None
    assert_gives_every_value(formula, values, number)
    values[data.draw(st.integers(0, count - 1))] += data.draw(st.integers(-2, 2))
    found = described(values)
    if found is not None:
        assert_gives_every_value(found, values, number)


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
