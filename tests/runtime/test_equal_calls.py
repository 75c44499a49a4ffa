"""Equal operations are inferred once in a trace, and the graph is the one that torch gives when all are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attngraph.capture import faster, trace
from attngraph.ir.graph.printer import format_file
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig


def _model(layers: int) -> nn.Module:
    return DecoderLM(DecoderLMConfig(vocab_size=17, layers=layers, width=16, heads=2, max_tokens=32)).eval()


def _inferred(monkeypatch: pytest.MonkeyPatch, layers: int) -> int:
    """How many results torch infers in a trace of so many layers."""
    count, infer = 0, FakeTensorMode._dispatch_impl

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return infer(*args)

    with monkeypatch.context() as patch:
        patch.setattr(FakeTensorMode, "_dispatch_impl", counted)
        trace.capture(_model(layers), (torch.randint(0, 17, (2, 9)),), {})
    return count


@pytest.mark.parametrize("gradients", [False, True])
def test_more_equal_layers_take_no_more_inferences(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        assert _inferred(monkeypatch, 6) == _inferred(monkeypatch, 3) > 0


def views_of_the_same_and_of_others(x: Tensor) -> Tensor:
    other = x + 1
    return x @ x.mT + x @ other.mT + x.expand_as(x) @ x.expand_as(other).mT


def a_table_that_a_loop_writes(x: Tensor) -> Tensor:
    table = torch.zeros(x.shape[0], 3, x.shape[1])
    for n in range(3):
        table[:, n] = x[..., n] * 2
    return table + table.requires_grad


def sizes_that_follow_from_values(x: Tensor) -> Tensor:
    first, second = (x > 0).nonzero(), (x > 1).nonzero()
    return first.sum() + second.sum() * first.shape[0] + second.shape[0]


def two_kinds_of_numbers(x: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x * 2.0, x * True, x.long() * 2, x.long() * 2.0, x * -0.0, x * 0.0, x / 2, x // 2


def what_is_returned_as_it_is(x: Tensor) -> tuple[Tensor, ...]:
    y = x.contiguous().to(x.dtype)
    return y.add(1).to(torch.float64), y.to(torch.float32), y.reshape(y.shape), y.mT.contiguous().mT


def a_tensor_that_changes_its_shape_in_place(x: Tensor) -> Tensor:
    a, b = x + 1, x + 1
    a.unsqueeze_(0)
    return a + b + (x + 1).flatten() @ (x + 1).flatten()


def with_and_without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = x.sin() * 2
    return x.sin() * 2 + fixed + (x.sin() * 2).detach()


def known_values(x: Tensor) -> Tensor:
    two, three = torch.tensor(2), torch.tensor(3)
    return x[..., : int(two)].sum() + x[..., : int(three)].sum() + (two + three).item()


def random_numbers(x: Tensor) -> Tensor:
    return torch.rand_like(x) + torch.rand_like(x) * x


EXAMPLES = [
    views_of_the_same_and_of_others, a_table_that_a_loop_writes, sizes_that_follow_from_values,
    two_kinds_of_numbers, what_is_returned_as_it_is, a_tensor_that_changes_its_shape_in_place,
    with_and_without_gradients, known_values, random_numbers,
]  # fmt: skip


@pytest.mark.parametrize("model", [*EXAMPLES, _model(2)], ids=lambda m: getattr(m, "__name__", "decoder"))
@pytest.mark.parametrize("gradients", [False, True])
def test_the_graph_is_what_torch_gives_without_it(
    monkeypatch: pytest.MonkeyPatch, model: Callable[..., Any], gradients: bool
) -> None:
    x = torch.randint(0, 17, (4, 9)) if isinstance(model, nn.Module) else torch.randn(4, 9, 9)

    def traced() -> tuple[str, str]:
        with torch.set_grad_enabled(gradients):
            given = x.clone().requires_grad_(gradients and x.is_floating_point())
            return format_file(trace.capture(model, (given,), {}).graph)

    found = traced()
    for name in ("equal_calls_inferred_once", "equal_formulas_computed_once"):
        monkeypatch.setattr(faster, name, contextlib.nullcontext)
    assert found == traced()
