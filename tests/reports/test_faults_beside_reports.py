"""Faults that were found while the public reports were tried, as small as they get; those that stand are
expected to fail."""

import importlib

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.reports.reports import REPORTS, Compiler, attend, same, tokens


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(
            "pytorch/pytorch#198095", marks=pytest.mark.xfail(strict=True, reason="a message of torch's own")
        ),
        "pytorch/pytorch#197896",
    ],
)
def test_why_a_model_is_in_pieces_is_told_in_words_of_the_users(key: str) -> None:
    for file in ("", "_of_tensors"):
        importlib.import_module(f"tests.reports.test_public_reports{file}")
    compiler = Compiler()
    REPORTS[key].program(compiler)
    for stop in compiler.compiled[0].report.breaks:
        assert "GraphModule" not in stop.reason and not stop.reason.endswith(" "), stop.reason


@pytest.mark.xfail(strict=True, reason="special methods of the model's class are looked up on the wrapper's")
def test_a_compiled_sequential_has_its_parts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    try:
        assert list(attngraph.compile(model)) == list(model)
    except TypeError as problem:
        raise AssertionError from problem


class Tied(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.same = self.one

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.one(x)) * (2 if self.same is self.one else -1)


def test_a_module_that_is_registered_twice_is_itself() -> None:
    model, x = Tied(), tokens()
    same(attngraph.compile(model, min_scores=0)(x), model(x))


def test_an_argument_that_forward_asks_to_need_a_gradient_needs_one() -> None:
    def f(x: Tensor) -> Tensor:
        return attend(x.requires_grad_())

    x = tokens()
    assert attngraph.compile(f, min_scores=0)(x).requires_grad and x.requires_grad


def test_memory_of_a_result_whose_strides_torch_tells_wrongly_is_read_as_in_eager() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.as_strided(torch.copysign(a, b), (4,), (1,)) * 1

    a, b = torch.rand(3, 2).mT, torch.ones(2, 3)
    same(attngraph.compile(f, min_scores=0)(a, b), f(a, b))
