"""Objects among a call's arguments that forward changes: a cache of keys and values, lists, dictionaries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.runtime.small import Of, attend, sequence


class Bag:
    """What users hand to a model to be filled."""

    def __init__(self, **held: Any) -> None:
        self.__dict__ |= held


def _keeps(m: Any, x: Tensor, bag: Any) -> tuple[Tensor, Bag]:
    """Attention over all tokens so far: the keys and values of earlier ones are in the bag."""
    q, k, v = m.qkv(x).chunk(3, -1)
    bag.k = k if bag.k is None else torch.cat((bag.k, k), 1)
    bag.v = v if bag.v is None else torch.cat((bag.v, v), 1)
    bag.filled = True
    if m.fails:
        bag.k, bag.v, bag.filled = None, None, False
        raise ValueError("stop")
    return attend(q, bag.k, bag.v), bag


def keeping(fails: bool = False) -> nn.Module:
    return Of(_keeps, qkv=nn.Linear(8, 24), fails=fails)


def empty() -> Any:
    return Bag(k=None, v=None, filled=False)


def contents(value: Any) -> Any:
    return contents(vars(value)) if isinstance(value, Bag) else value


def agree(model: Any, given: Callable[[], tuple[Any, ...]], **options: Any) -> Any:
    """Calls of three lengths, each compared with eager in results and in what the arguments hold."""
    compiled, mine, theirs = attngraph.compile(model, min_scores=0, **options), given(), given()
    for tokens in (5, 6, 7):
        x, held = sequence(tokens), []
        for run, args in ((compiled, mine), (model, theirs)):
            found = run(x, *args)
            results = found if isinstance(found, tuple) else (found,)
            held.append([contents(v) for v in (*results, *args)])
        torch.testing.assert_close(*held)
    return compiled


@torch.no_grad()
def test_a_cache_that_a_model_is_given_is_part_of_one_graph() -> None:
    compiled = agree(keeping(), lambda: (empty(),), strict=True)
    assert compiled.report.graphs == 2  # the first call and all others
    assert len(compiled.report.attention) == 1
    bag = empty()
    assert compiled(sequence(4), bag)[1] is bag
    for _ in range(3):
        compiled(sequence(1), bag)
    assert bag.k.shape == (2, 7, 8)
    assert compiled.report.graphs <= 3  # a single token may be a graph of its own


def test_entries_of_lists_and_dictionaries_are_set_in_those_of_the_caller(x: Tensor) -> None:
    def writes(x: Tensor, entries: list[Any], named: dict[str, Any]) -> tuple[Tensor, list[Any]]:
        entries[0], named["last"] = x * 2, x + 1
        return attend(x), entries

    compiled = agree(writes, lambda: ([torch.ones(2)], {"last": None}), strict=True)
    entries: list[Any] = [torch.ones(2)]
    assert compiled(x, entries, {"last": None})[1] is entries
    torch.testing.assert_close(entries[0], x * 2)


def test_an_object_given_twice_is_not_taken_for_two(x: Tensor) -> None:
    def both(x: Tensor, one: Any, two: Any) -> Tensor:
        one.last = x + 1
        two.last = one.last * 2
        return one.last + two.last  # type: ignore[no-any-return]

    compiled = agree(both, lambda: (Bag(last=None), Bag(last=None)))
    mine: Any = Bag(last=None)
    torch.testing.assert_close(compiled(x, mine, mine), (x + 1) * 4)
    torch.testing.assert_close(mine.last, (x + 1) * 2)


def _counts(m: Any, x: Tensor, bag: Any) -> Any:
    bag.count += 1
    return x * bag.count


def _grows(m: Any, x: Tensor, entries: list[Tensor]) -> Any:
    entries.append(x)
    return x + len(entries)


def _lends(m: Any, x: Tensor, bag: Any) -> Any:
    """Hands out a list of its own."""
    bag.entries = m.kept
    return x + 1


@pytest.mark.parametrize(
    ("function", "given", "told"),
    [
        (_counts, lambda: (Bag(count=3),), "arguments[1].count"),
        (_grows, lambda: ([torch.ones(2, 1, 8)],), "arguments[1]"),
        (_lends, lambda: (Bag(entries=None),), "arguments[1].entries"),
    ],
)
def test_what_would_be_another_graph_in_each_call_is_left_to_pieces(
    function: Any, given: Callable[[], Any], told: str
) -> None:
    compiled = agree(Of(function, kept=[]), given)
    (found,) = {b.reason for b in compiled.report.breaks}
    assert found == f"forward() changes an argument's attributes: {told}"


def test_an_attribute_that_is_deleted_is_deleted(x: Tensor) -> None:
    def deletes(x: Tensor, bag: Any) -> Tensor:
        del bag.last
        return x + 1

    bag = Bag(last=torch.ones(1))
    attngraph.compile(deletes, min_scores=0)(x, bag)
    assert not hasattr(bag, "last")


def test_a_call_or_a_trace_that_fails_leaves_the_arguments_as_they_were(tmp_path: Any) -> None:
    compiled, bag = attngraph.compile(keeping(), min_scores=0), empty()
    compiled(sequence(4), bag)
    before = dict(vars(bag))
    with pytest.raises(RuntimeError):
        compiled(sequence(4, 3), bag)  # another batch than the cache has
    assert all(vars(bag)[name] is value for name, value in before.items())
    with pytest.raises(attngraph.SavedError, match="changes objects among its arguments"):
        compiled.save(tmp_path / "saved")
    bag = empty()
    with pytest.raises(ValueError, match="stop"):
        attngraph.compile(keeping(fails=True), min_scores=0)(sequence(4), bag)
    assert contents(bag) == contents(empty())
