"""A trace leaves no marks: what it changes in the model's state is put back, and every change is noticed."""

from __future__ import annotations

import builtins
import collections
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import CaptureError

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def count_in_slots(state: Slots) -> float:
    state.count += 1
    return state.count


def count_in_tensor(state: Tensor) -> Tensor:
    state += 1
    return state


def count_in_array(state: Any) -> float:
    state += 1
    return float(state[0])


def count_by_appending(state: Any) -> float:
    state.append(1)
    return len(state)


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "slots": (Slots, count_in_slots),
    "a tensor that is no buffer": (lambda: torch.zeros(()), count_in_tensor),
    "a numpy array": (lambda: numpy.zeros(2), count_in_array),
    "a deque": (collections.deque, count_by_appending),
    "a bounded deque": (lambda: collections.deque(maxlen=9), count_by_appending),
    "a bytearray": (bytearray, count_by_appending),
    "itertools.count": (lambda: itertools.count(1), next),
    "an iterator": (lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0]), next),
    "a generator": (lambda: (float(n) for n in range(1, 9)), next),
}


class Counting(nn.Module):
    """Multiplies its result by how often it was called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make, self.count = COUNTERS[name]
        self.state = make()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.softmax(x @ x.mT, -1) @ x * self.count(self.state)
        return found


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", COUNTERS)
def test_calls_are_counted_as_in_eager(name: str, gradients: bool) -> None:
    compiled, once = attngraph.compile(Counting(name), min_scores=0), torch.softmax(X @ X.mT, -1) @ X
    with torch.set_grad_enabled(gradients):
        for number in range(1, 4):
            torch.testing.assert_close(compiled(X), once * number, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", COUNTERS)
def test_the_reason_names_the_attribute(name: str) -> None:
    what = (
        "the attribute count of a Slots"
        if name == "slots"
        else r"(the tensor|the attribute|an iterator,.*) state"
    )
    with pytest.raises(CaptureError, match=rf"forward\(\) (changes|advances) {what}"):
        attngraph.compile(Counting(name), strict=True)(X)


class Namespace(nn.Module):
    """Calls a function of code that was run, which has Python's own names beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, Any] = {"calls": 0}
        exec("def weights(x):\n    return x.softmax(-1)\n", self.names)

    def forward(self, x: Tensor) -> Tensor:
        self.names["calls"] += 1
        return self.names["weights"](x @ x.mT) @ x * self.names["calls"]


def test_pythons_own_names_are_left_alone() -> None:
    x, mine, theirs = torch.randn(2, 5, 8), Namespace(), Namespace()
    compiled, before = attngraph.compile(mine), list(vars(builtins).values())
    for _ in range(3):
        torch.testing.assert_close(compiled(x), theirs(x))
    assert mine.names["calls"] == theirs.names["calls"] == 3
    assert all(a is b for a, b in zip(before, vars(builtins).values(), strict=True))


def test_an_iterator_that_is_not_advanced_stands_in_no_ones_way() -> None:
    model = Counting("a deque")
    model.count = lambda state: 1.0
    model.numbers: Iterator[int] = itertools.count()  # type: ignore[misc]
    compiled = attngraph.compile(model, strict=True, min_scores=0)
    torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-5)
    assert next(model.numbers) == 0


class Averaging(nn.Module):
    """Keeps a running mean of what it projects, as codebooks and batch norms do."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(8, 8), write
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x)
        with torch.no_grad():
            self.write(self.mean, q.mean((0, 1)))
        found: Tensor = torch.softmax((q - self.mean) @ x.mT, -1) @ x
        return found


AVERAGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda mean, new: mean.mul_(0.9).add_(new, alpha=0.1),
    "lerp_": lambda mean, new: mean.lerp_(new, 0.1),
    "copy_": lambda mean, new: mean.copy_(0.9 * mean + 0.1 * new),
    "a part": lambda mean, new: mean[2:].add_(new[2:]),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_a_running_mean_takes_no_gradients_along(name: str) -> None:
    torch.manual_seed(0)
    model, other = Averaging(AVERAGES[name]), Averaging(AVERAGES[name])
    other.load_state_dict(model.state_dict())
    compiled = attngraph.compile(other, strict=True, min_scores=0)
    for _ in range(3):
        for run in (model, compiled):
            (run(X) * torch.arange(8.0)).sum().backward()
        assert not other.mean.requires_grad  # type: ignore[union-attr]
        torch.testing.assert_close(other.mean, model.mean)
    assert model.layer.weight.grad is not None
    torch.testing.assert_close(other.layer.weight.grad, model.layer.weight.grad, rtol=1e-4, atol=1e-4)
