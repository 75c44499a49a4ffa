"""Which indices of a dimension each rank has: blocks, digits of packed dimensions, and shared heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attngraph.meaning.placement.table import Table, is_cut, united


def _table(*rows: list[int], extent: int) -> Table:
    found = Table.of((torch.tensor(row) for row in rows), extent)
    assert found is not None
    return found


def test_blocks_are_one_run_of_each_rank() -> None:
    assert Table.blocks(6, 3) == _table([0, 1], [2, 3], [4, 5], extent=6)
    assert Table.blocks(6, 3).runs() == 1


@given(runs=st.integers(1, 4), ranks=st.integers(2, 4), rest=st.integers(1, 3))
def test_a_middle_digit_is_found_in_packed_rows(runs: int, ranks: int, rest: int) -> None:
    whole = torch.arange(runs * ranks * rest).view(runs, ranks, rest)
    table = _table(*(whole[:, r].flatten().tolist() for r in range(ranks)), extent=whole.numel())
    assert table.runs() == (1 if runs == 1 else runs)


@pytest.mark.parametrize(
    "rows, extent",
    [
        ([[0, 1, 4], [2, 3, 5]], 6),  # packed rows of unequal parts: queries of two widths of keys
        ([[0, 2], [1, 3]], 5),  # nobody has the last
        ([[0, 1], [0, 1]], 2),  # all ranks have all
        ([[0], [0], [1], [1]], 2),  # heads that ranks share
    ],
)
def test_other_cuts_are_no_equal_runs(rows: list[list[int]], extent: int) -> None:
    assert _table(*rows, extent=extent).runs() in (None, 2)
    assert _table([0, 1, 4], [2, 3, 5], extent=6).runs() is None


def test_ranks_with_unequally_many_indices_have_no_table() -> None:
    assert Table.of([torch.tensor([0, 1]), torch.tensor([2])], 3) is None


def test_heads_that_ranks_share_are_counted() -> None:
    table = _table([0], [0], [1], [1], extent=2)
    assert table.copies == 2 and table.runs() is None


def test_where_a_rank_has_what_is_wanted() -> None:
    have, want = _table([0, 1, 4], [2, 3, 5], extent=6), _table([1, 4], [3, 5], extent=6)
    places = have.positions(want)
    assert places is not None and places.tolist() == [[1, 2], [1, 2]]
    assert want.positions(have) is None


def test_uses_of_one_value_are_united() -> None:
    queries, keys = _table([0, 1], [2, 3], extent=6), _table([4], [5], extent=6)
    both = united([{1: queries}, {1: keys}])
    assert both == {1: _table([0, 1, 4], [2, 3, 5], extent=6)}
    assert united([{1: queries}, {}]) == {}


def test_what_all_ranks_have_alike_is_no_cut() -> None:
    assert not is_cut({0: _table([1, 2], [1, 2], extent=4)})
    assert is_cut({0: _table([1, 2], [1, 3], extent=4)})
