"""The report has every attention: without a softmax too, what tensors its program reads, and who calls it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.report.report import CompileReport

Q, K, V = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).unbind()
LEFT = "left as the model has it: its weights are a function of the scores other than a multiple"


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT).tril() @ v


def squares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8).square().tril() @ v


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.exp() @ k.exp().mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v + sigmoid(q, k, v)


@pytest.mark.parametrize(
    ("attend", "counted", "told"),
    [
        (sigmoid, "0 of 1 attention(s) without a softmax reassociated", LEFT),
        (squares, "0 of 1 attention(s) without a softmax reassociated", LEFT),
        (
            linear,
            "1 of 1 attention(s) without a softmax reassociated",
            "causal, keys and values are summed first",
        ),
        (both, "1 of 1 softmax-like places fused, 0 of 1 attention(s) without a softmax", LEFT),
    ],
)
def test_an_attention_without_a_softmax_is_told_with_what_became_of_it(
    attend: Callable[..., Tensor], counted: str, told: str
) -> None:
    report = attngraph.explain(attend, Q, K, V)
    text = str(report)
    assert counted in text and told in text
    (other,) = report.others
    assert f"attention without a softmax   {other.source}" in text
    assert CompileReport.from_json(report.to_json()).others == report.others


def test_a_softmax_that_is_not_fused_is_told_once_and_a_layer_is_no_attention() -> None:
    def used_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.mT, -1)
        return (weights @ v).square().mean() - weights.square().mean()

    report = attngraph.explain(used_twice, Q, K, V)
    assert len(report.missed) == 1 and report.others == ()
    two_layers = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))
    assert attngraph.explain(two_layers, torch.randn(5, 16)).others == ()


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 64, 64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        noise = (mask * 3.0).cumsum(-1)
        return torch.softmax(q @ k.mT + self.bias + mask + noise.sin(), -1) @ v


def test_the_tensors_that_a_program_reads_have_names() -> None:
    text = str(attngraph.explain(Biased(), Q, K, V, torch.randn(64, 64)))
    assert "bias (parameter)" in text
    assert "tensor 3 of the arguments" in text
    assert "computed at tests/reports/test_every_attention.py:" in text


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.utils.deprecation import deprecate_kwarg

    return functools.wraps(function)(deprecate_kwarg("old", version="99.0.0")(function))


def test_a_decorator_is_not_who_calls_an_attention() -> None:
    pytest.importorskip("transformers", reason="the transformers package is not installed")

    class Layer(nn.Module):
        @passed_on
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.mT, -1) @ v

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.layer(q, k, v)

    (entry,) = attngraph.explain(Model(), Q, K, V).attention
    assert entry.caller == ""
