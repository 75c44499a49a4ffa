"""Fewer operations, the same values; near misses keep theirs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attngraph.capture.trace import capture
from attngraph.ir.graph.program_graph import Level, ProgramGraph, op_name
from attngraph.passes.tidy import Tidy
from attngraph.pipeline import run


class Model(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = torch.nn.Parameter(torch.randn(8)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def tidied(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[str], ProgramGraph]:
    model, x = Model(function), torch.randn(2, 3, 8)
    with torch.no_grad():
        graph = capture(model, (x,), {}).graph
        graph.level = Level.CACHED
        run(graph, (Tidy(),))
        torch.testing.assert_close(graph.module(model.weight, x)[0], model(x))
    return [op_name(n) for n in graph.graph.nodes if n.op == "call_function"], graph


def new_gelu(x: Tensor, w: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def rms(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rms_by_division(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (new_gelu, "gelu"),
        (lambda x, w: x * torch.sigmoid(x) + w, "silu"),
        (rms, "rms_norm"),
        (rms_by_division, "rms_norm"),
        (lambda x, w: rms(functional.relu(x) + x, w), "rms_norm"),
    ],
)
def test_what_is_written_out_gets_its_name(function: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
    assert name in tidied(function)[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3.0))),
        lambda x, w: x * torch.sigmoid(1.7 * x),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
        lambda x, w: w * (x * torch.rsqrt((x - x.mean()).pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda x, w: (1 + w) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    ],
)
def test_near_misses_keep_their_operations(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert not {"gelu", "silu", "rms_norm"} & set(tidied(function)[0])


def test_views_of_views_are_one_and_twins_are_one() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a = x.reshape(-1, 8).unflatten(1, (2, 4)).flatten(0, 1)
        b = x.reshape(-1, 8).unflatten(1, (2, 4)).flatten(0, 1)
        return torch.maximum(a, b)

    names, _ = tidied(function)
    assert names.count("maximum") == 1
    assert sum(n in ("reshape", "view", "unflatten", "flatten") for n in names) == 1


def test_random_numbers_are_drawn_twice() -> None:
    model = Model(lambda x, w: torch.rand_like(x) - torch.rand_like(x))
    with torch.no_grad():
        graph = capture(model, (torch.randn(2, 3, 8),), {}).graph
        graph.level = Level.CACHED
        run(graph, (Tidy(),))
        assert graph.module(model.weight, torch.randn(2, 3, 8))[0].abs().max() > 0
