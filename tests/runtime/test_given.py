"""Objects among a call's arguments that forward changes: a cache of keys and values, lists, dictionaries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph


class Bag:
    """What users hand to a model to be filled."""

    def __init__(self, **held: Any) -> None:
        self.__dict__ |= held


class Keeps(nn.Module):
    """Attention over all tokens so far: the keys and values of earlier ones are in the bag."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, bag: Bag) -> tuple[Tensor, Bag]:
        q, k, v = self.qkv(x).chunk(3, -1)
        bag.k = k if bag.k is None else torch.cat((bag.k, k), 1)
        bag.v = v if bag.v is None else torch.cat((bag.v, v), 1)
        bag.filled = True
        return torch.softmax(q @ bag.k.mT, -1) @ bag.v, bag


class Writes(nn.Module):
    """Sets an entry of a list and of a dictionary."""

    def forward(self, x: Tensor, entries: list[Any], named: dict[str, Any]) -> tuple[Tensor, list[Any]]:
        entries[0], named["last"] = x * 2, x + 1
        return torch.softmax(x @ x.mT, -1) @ x, entries


class Both(nn.Module):
    """Two bags, of which the second is made from the first."""

    def forward(self, x: Tensor, one: Bag, two: Bag) -> Tensor:
        one.last = x + 1
        two.last = one.last * 2
        return one.last + two.last


class Counts(nn.Module):
    def forward(self, x: Tensor, bag: Bag) -> Tensor:
        bag.count += 1
        return x * bag.count


class Grows(nn.Module):
    def forward(self, x: Tensor, entries: list[Tensor]) -> Tensor:
        entries.append(x)
        return x + len(entries)


class Lends(nn.Module):
    """Hands out a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, bag: Bag) -> Tensor:
        bag.entries = self.kept
        return x + 1


class Deletes(nn.Module):
    def forward(self, x: Tensor, bag: Bag) -> Tensor:
        del bag.last
        return x + 1


def contents(value: Any) -> Any:
    return contents(vars(value)) if isinstance(value, Bag) else value


def agree(model: nn.Module, given: Callable[[], tuple[Any, ...]], **options: Any) -> Any:
    """Calls of three lengths, each compared with eager in results and in what the arguments hold."""
    compiled, mine, theirs = attngraph.compile(model, min_scores=0, **options), given(), given()
    for length in (5, 6, 7):
        x = torch.randn(2, length, 8)
        found, wanted = compiled(x, *mine), model(x, *theirs)
        torch.testing.assert_close(
            [contents(v) for v in (*_tuple(found), *mine)], [contents(v) for v in (*_tuple(wanted), *theirs)]
        )
    return compiled


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@torch.no_grad()
def test_a_cache_that_a_model_is_given_is_part_of_one_graph() -> None:
    compiled = agree(Keeps(), lambda: (Bag(k=None, v=None, filled=False),), strict=True)
    assert compiled.report.graphs == 2  # the first call and all others
    assert len(compiled.report.attention) == 1
    bag = Bag(k=None, v=None, filled=False)
    assert compiled(torch.randn(2, 4, 8), bag)[1] is bag
    for _ in range(3):
        compiled(torch.randn(2, 1, 8), bag)
    assert bag.k.shape == (2, 7, 8)
    assert compiled.report.graphs <= 3  # a single token may be a graph of its own


def test_entries_of_lists_and_dictionaries_are_set_in_those_of_the_caller() -> None:
    compiled = agree(Writes(), lambda: ([torch.ones(2)], {"last": None}), strict=True)
    entries: list[Any] = [torch.ones(2)]
    x = torch.randn(2, 5, 8)
    assert compiled(x, entries, {"last": None})[1] is entries
    torch.testing.assert_close(entries[0], x * 2)


def test_an_object_given_twice_is_not_taken_for_two() -> None:
    model, x = Both(), torch.randn(2, 5, 8)
    compiled = agree(model, lambda: (Bag(last=None), Bag(last=None)))
    mine, theirs = Bag(last=None), Bag(last=None)
    torch.testing.assert_close(compiled(x, mine, mine), model(x, theirs, theirs))
    torch.testing.assert_close(mine.last, theirs.last)


@pytest.mark.parametrize(
    ("model", "given", "told"),
    [
        (Counts(), lambda: (Bag(count=3),), "arguments[1].count"),
        (Grows(), lambda: ([torch.ones(2, 1, 8)],), "arguments[1]"),
        (Lends(), lambda: (Bag(entries=None),), "arguments[1].entries"),
    ],
)
def test_what_would_be_another_graph_in_each_call_is_left_to_pieces(
    model: nn.Module, given: Callable[[], Any], told: str
) -> None:
    compiled = agree(model, given)
    (found,) = {b.reason for b in compiled.report.breaks}
    assert found == f"forward() changes an argument's attributes: {told}"


def test_an_attribute_that_is_deleted_is_deleted() -> None:
    model, bag = Deletes(), Bag(last=torch.ones(1))
    compiled = attngraph.compile(model, min_scores=0)
    compiled(torch.randn(2, 5, 8), bag)
    assert not hasattr(bag, "last")


def test_a_failed_call_leaves_the_arguments_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = attngraph.compile(Keeps(), min_scores=0)
    bag = Bag(k=None, v=None, filled=False)
    compiled(torch.randn(2, 4, 8), bag)
    before = copy.copy(vars(bag))
    with pytest.raises(RuntimeError):
        compiled(torch.randn(3, 4, 8), bag)  # another batch than the cache has
    assert all(vars(bag)[name] is value for name, value in before.items())


def test_a_trace_leaves_no_stand_ins_in_the_arguments() -> None:
    bag = Bag(k=None, v=None, filled=False)
    with pytest.raises(ValueError, match="stop"):
        attngraph.compile(Stops(), min_scores=0)(torch.randn(2, 4, 8), bag)
    assert bag.k is None
    assert bag.filled is False


class Stops(Keeps):
    def forward(self, x: Tensor, bag: Bag) -> tuple[Tensor, Bag]:
        super().forward(x, bag)
        bag.k, bag.v, bag.filled = None, None, False
        raise ValueError("stop")


def test_a_graph_that_changes_its_arguments_is_no_file(tmp_path: Any) -> None:
    compiled = attngraph.compile(Keeps(), min_scores=0)
    compiled(torch.randn(2, 4, 8), Bag(k=None, v=None, filled=False))
    with pytest.raises(attngraph.SavedError, match="changes objects among its arguments"):
        compiled.save(tmp_path / "saved")
