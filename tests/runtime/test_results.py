"""What one may do with results: write to them, differentiate them again, and put compiled models inside other
machinery of PyTorch. How results lie in memory is in test_layouts.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attngraph
from tests.runtime.small import SelfAttention, agree, attend, gradients, same, sequence


def test_constants_may_be_written_to_without_harm_to_later_calls(x: Tensor) -> None:
    compiled = attngraph.compile(lambda x: (torch.arange(4.0), torch.tensor([1.0, 2.0]), attend(x)))
    for _ in range(3):
        first, second, _ = compiled(x)
        assert first.tolist() == [0.0, 1.0, 2.0, 3.0] and second.tolist() == [1.0, 2.0]
        first.zero_()
        second.zero_()


@pytest.mark.parametrize("views", [False, True], ids=["whole", "a view"])
def test_a_result_may_be_changed_in_place_and_differentiated(views: bool, x: Tensor) -> None:
    model = SelfAttention()
    compiled, found = attngraph.compile(model), []
    for function in (compiled, model):
        y = function(x)
        (y[:, 1:] if views else y).mul_(2)
        found.append(torch.autograd.grad(y.square().sum(), list(model.parameters()), retain_graph=True))
        found[-1] += torch.autograd.grad(y.square().sum(), list(model.parameters()))
    same(*found)
    same(compiled(x), model(x))


@pytest.mark.parametrize("name", ["jvp", "vmap", "grad", "jacrev", "hessian"])
def test_function_transformations_give_what_they_give_in_eager(name: str) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    compiled = attngraph.compile(attend)
    compiled(x)
    transform: dict[str, Callable[[Callable[..., Any]], Any]] = {
        "jvp": lambda f: torch.func.jvp(f, (x,), (x.cos(),)),
        "grad": lambda f: torch.func.grad(lambda z: f(z).square().sum())(x),
        "vmap": lambda f: torch.func.vmap(f)(torch.stack([x, x + 1, x * 2])),
        "jacrev": lambda f: torch.func.jacrev(f)(x[:1]),
        "hessian": lambda f: torch.func.hessian(lambda z: f(z).square().sum())(x[:1]),
    }
    same(transform[name](compiled), transform[name](attend), 1e-9)


def test_functional_call_uses_the_weights_it_is_given(x: Tensor) -> None:
    model = SelfAttention()
    compiled = agree(model, x)
    new = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    expected = torch.func.functional_call(model, new, (x,))
    same(torch.func.functional_call(compiled, {f"_orig_mod.{k}": v for k, v in new.items()}, (x,)), expected)
    same(compiled(x), model(x))


def test_a_compiled_model_may_be_checkpointed() -> None:
    model, x = SelfAttention(), sequence(requires_grad=True)
    compiled = attngraph.compile(model)
    for _ in range(2):
        same(gradients(checkpoint(compiled, x, use_reentrant=False), [x]), gradients(model(x), [x]))


def test_dynamo_can_trace_what_inductor_is_given(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    agree(nn.Sequential(SelfAttention(), nn.GELU()), x, inductor=True)


@pytest.mark.slow
def test_inductor_compiles_the_rest() -> None:
    model = nn.Sequential(attngraph.compile(SelfAttention()), SelfAttention(), nn.GELU())  # nested, too
    with torch.no_grad():
        agree(model, sequence(5), sequence(7), inductor=True, fused=2)
    agree(model, sequence(5), inductor=True, grads=True)
