"""Checks of values that only raise are kept in one graph; the model's own error is raised where one fails."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.runtime.small import agree, same, sequence

GOOD, BAD = torch.ones(5, 5, dtype=torch.bool), torch.zeros(5, 5, dtype=torch.bool)


def attend(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.mT).masked_fill(~mask, -1e9).softmax(-1) @ x


def _assert(x: Tensor, mask: Tensor) -> Tensor:
    assert mask.any(), "nothing is left"
    return attend(x, mask)


def _two_asserts(x: Tensor, mask: Tensor) -> Tensor:
    if not (mask.any() and not x.isnan().any()):  # as `assert a and b`, which pytest writes in another way
        raise AssertionError(f"nothing is left of {x.shape}")
    return attend(x, mask)


def _raise(x: Tensor, mask: Tensor) -> Tensor:
    if not torch.any(mask):
        words = ["nothing", "is", "left"]
        raise ValueError(" ".join(words))
    return attend(x, mask)


def _either(x: Tensor, mask: Tensor) -> Tensor:
    if x.isinf().any() or mask.sum() < 3:
        raise IndexError("nothing is left")
    return attend(x, mask)


def _as_bool(x: Tensor, mask: Tensor) -> Tensor:
    if not bool(mask.any(-1).all()):
        raise KeyError("nothing is left")
    return attend(x, mask)


def _number(x: Tensor, mask: Tensor) -> Tensor:
    if mask.sum().item() < 3:
        raise ValueError("nothing is left")
    return attend(x, mask)


def _torchs(x: Tensor, mask: Tensor) -> Tensor:
    torch._assert(mask.any(), "nothing is left")
    return attend(x, mask)


def _before_an_index(x: Tensor, mask: Tensor) -> Tensor:
    """What comes after the check would fail with an error of its own."""
    places = torch.where(mask, torch.arange(5), 99)
    if places.max() >= x.shape[1]:
        raise ValueError("nothing is left")
    return attend(x.index_select(1, places[0]), mask)


CHECKS = [_assert, _two_asserts, _raise, _either, _as_bool, _number, _torchs, _before_an_index]


@pytest.mark.parametrize("checked", CHECKS)
def test_a_check_stays_in_the_graph_and_raises_the_models_own_error(checked: Any) -> None:
    compiled = attngraph.compile(checked)
    for rows in (2, 3):
        x = sequence(5, rows)
        same(compiled(x, GOOD), checked(x, GOOD))
        with pytest.raises(Exception, match="nothing is left") as wanted:
            checked(x, BAD)
        with pytest.raises(Exception, match="nothing is left") as raised:
            compiled(x, BAD)
        assert (raised.type, str(raised.value)) == (wanted.type, str(wanted.value))
    report = compiled.report
    assert (report.graphs, report.breaks, len(report.attention)) == (1, (), 1)


class Counting(nn.Module):
    """Writes to a buffer, then checks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.last: Any = None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        assert mask.any(), "nothing is left"
        self.last = x.sum()
        return attend(x, mask)


def test_a_check_that_fails_leaves_what_it_leaves_in_eager() -> None:
    model, reference = Counting(), Counting()
    compiled = attngraph.compile(model)
    for mask in (GOOD, BAD, GOOD):
        x = sequence()
        for each in (compiled, reference):
            if mask is GOOD:
                each(x, mask)
            else:
                with pytest.raises(AssertionError, match="nothing is left"):
                    each(x, mask)
        same((model.calls, model.last), (reference.calls, reference.last))
    assert not compiled.report.breaks


def _branches(x: Tensor, mask: Tensor) -> Tensor:
    if mask.all():
        return x.softmax(-1)
    return attend(x, mask)


def _raises_in_part(x: Tensor, mask: Tensor) -> Tensor:
    if not mask.any():
        if x.shape[0] > 2:
            raise ValueError("nothing is left")
        x = x * 2
    return attend(x, mask)


def _catches(x: Tensor, mask: Tensor) -> Tensor:
    try:
        if not mask.any():
            raise ValueError("nothing is left")
    except ValueError:
        x = x * 2
    return attend(x, mask)


@pytest.mark.parametrize("branching", [_branches, _raises_in_part, _catches])
def test_a_branch_that_does_not_only_raise_keeps_both_ways(branching: Any) -> None:
    agree(branching, *((sequence(), mask) for mask in (GOOD, BAD, GOOD)))


def test_known_values_are_asked_as_ever(x: Tensor) -> None:
    def known(x: Tensor, mask: Tensor) -> Tensor:
        if torch.tensor(True):
            x = x * 2
        assert torch.arange(3).sum() == 3
        return attend(x, mask)

    agree(known, (x, GOOD), reason="")


def test_a_decoder_says_what_it_does_not_check() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

        def forward(self, ids: Tensor) -> Tensor:
            if (ids >= 11).any() or ids.min().item() < 0:
                raise ValueError("no such token")
            x = self.embed(ids)
            return self.head(attend(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()))  # type: ignore[no-any-return]

    model = Model().eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(0, 11, (2, 6))
    same(decoder.prefill(ids)[0], model(ids).detach())
    assert decoder.report.cache is not None
    (line,) = decoder.report.cache.unchecked
    assert f"not checked, unlike by the model's own forward(): {line}" in str(decoder.report)
