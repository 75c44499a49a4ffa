"""What a forward draws from the process, or does to it, is no constant of a graph: calls answer as eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as drawn

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attngraph
from attngraph import CaptureError
from attngraph.capture.graph_breaks import GraphBreaks

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


def attend(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ k


class Dropping(nn.Module):
    """Leaves out layers by chance, as LayerDrop does."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            if self.draw() < 0.5:
                x = x + attend(self.layer(x), x)
        return x


def with_pythons(x: Tensor) -> Tensor:
    return attend(x * random.uniform(1, 2), x)


def with_numpys(x: Tensor) -> Tensor:
    return attend(x * float(numpy.random.uniform(1, 2)), x)


def with_a_name(x: Tensor) -> Tensor:
    return attend(x * drawn(), x)


def shortened(x: Tensor) -> Tensor:
    return attend(x[:, : random.randint(1, 6)], x)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return attend(x + torch.randn_like(x), x)


def with_gradients_inside(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(attend(y, y).square().sum(), y)
    return attend(x - 0.1 * slope, x)


WHY = {
    with_pythons: "draws random numbers from Python's random",
    with_numpys: "draws random numbers from numpy",
    with_a_name: "draws random numbers from Python's random",
    shortened: "draws random numbers from Python's random",
    seeded: "calls torch.manual_seed",
    with_gradients_inside: "computes gradients",
}


def calls(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The results of four calls, for each of which random numbers begin anew."""
    found = []
    for seed in range(4):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        found.append(function(X).detach())
    return found


@pytest.mark.parametrize("function", [f for f in WHY if f is not with_numpys], ids=lambda f: f.__name__)
def test_each_call_draws_and_seeds_as_eager_does(function: Callable[[Tensor], Tensor]) -> None:
    compiled = attngraph.compile(function, min_scores=0)
    torch.testing.assert_close(calls(compiled), calls(function), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", WHY, ids=lambda f: f.__name__)
def test_the_reason_says_what_and_names_the_line(function: Callable[[Tensor], Tensor]) -> None:
    line = "" if function is with_a_name else r" at .*process_state.py:\d+"
    with pytest.raises(CaptureError, match=rf"forward\(\) {WHY[function]}{line}"):
        attngraph.compile(function, strict=True)(X)


def test_numpys_numbers_are_drawn_in_each_call() -> None:
    compiled = attngraph.compile(with_numpys, min_scores=0)  # from torch's stream: torch.compile has it so
    first, second, *_ = calls(compiled)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["python", "numpy"])
def test_layers_that_are_left_out_by_chance(draw: Callable[[], float]) -> None:
    model = Dropping(draw)
    compiled = attngraph.compile(model, min_scores=0)
    torch.testing.assert_close(calls(compiled), calls(model), rtol=1e-4, atol=1e-5)


OF_ONE_VALUE: dict[str, Callable[[], float]] = {
    "randrange": lambda: random.randrange(1),
    "randint": lambda: random.randint(3, 3),
    "uniform": lambda: random.uniform(2.0, 2.0),
    "choice": lambda: random.choice([5]),
}


@pytest.mark.parametrize("name", OF_ONE_VALUE)
def test_a_draw_of_one_possible_value_is_no_draw(name: str) -> None:
    def model(x: Tensor) -> Tensor:
        return attend(x * (1 + OF_ONE_VALUE[name]()), x)

    compiled = attngraph.compile(model, strict=True, min_scores=0)
    assert torch.allclose(compiled(X), model(X), atol=1e-6)
    assert compiled.report.graphs == 1


def test_a_draw_of_two_possible_values_is_one() -> None:
    def model(x: Tensor) -> Tensor:
        return attend(x * (1 + random.randrange(2)), x)

    with pytest.raises(CaptureError, match="draws random numbers from Python's random"):
        attngraph.compile(model, strict=True, min_scores=0)(X)


def test_a_trace_takes_no_numbers_from_the_stream() -> None:
    random.seed(1)
    numpy.random.seed(1)
    expected = random.random(), numpy.random.rand()
    random.seed(1)
    numpy.random.seed(1)
    for function in (with_pythons, with_numpys):
        with pytest.raises(CaptureError):
            attngraph.compile(function, strict=True)(X)
    assert (random.random(), numpy.random.rand()) == expected


def test_a_default_dtype_that_is_put_back_is_followed() -> None:
    def in_float64(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return attend(x, x) * torch.ones(8)
        finally:
            torch.set_default_dtype(torch.float32)

    compiled = attngraph.compile(in_float64, strict=True, min_scores=0)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), in_float64(X), rtol=1e-4, atol=1e-5)


def test_a_default_that_is_not_put_back_is_no_part_of_a_graph() -> None:
    def changing(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return attend(x, x)

    try:
        with pytest.raises(CaptureError, match=r"changes torch's default dtype at .*process_state.py:\d+"):
            attngraph.compile(changing, strict=True)(X)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_fused_and_have_eagers_gradients(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def block(self, x: Tensor) -> Tensor:
            return x + nn.functional.dropout(attend(self.layer(x), x), 0.3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.block, x, use_reentrant=reentrant)
            return found

    model = Checkpointed()
    # torch 2.11 fails when it traces what checkpoint does without reentering: such a model runs in pieces
    whole = reentrant or torch.__version__ >= "2.14"
    compiled = attngraph.compile(model, strict=whole, min_scores=0)
    found = []
    for run in (compiled, model):
        model.zero_grad()
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        out = run(x)
        (out * torch.arange(8.0)).sum().backward()
        assert x.grad is not None and model.layer.weight.grad is not None
        found.append([out.detach(), x.grad, model.layer.weight.grad.clone()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert not whole or len(compiled.report.attention) == 1


def test_a_failure_inside_of_torch_compile_runs_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def printing(x: Tensor) -> Tensor:
        print(end="")
        return attend(x, x)

    def fails(*args: object) -> Tensor:
        torch._dynamo.guards.GuardBuilder.ID_MATCH(None, None)  # type: ignore[arg-type]
        raise AssertionError("unreachable")

    pieces = GraphBreaks(printing, lambda module: module, CaptureError("it prints", "it prints"))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(pieces, "run", fails)
    assert torch.equal(pieces(X), printing(X))
    assert "torch.compile cannot capture it either" in pieces.breaks[-1].reason


def test_an_error_of_the_model_in_pieces_is_the_models() -> None:
    def failing(x: Tensor) -> Tensor:
        print(end="")
        if x.shape[0] > 1:
            raise ZeroDivisionError("mine")
        return attend(x, x)

    with pytest.raises(ZeroDivisionError, match="mine"):
        attngraph.compile(failing)(X)
