"""A compiled model is the model for whatever reads or writes it: attributes, names, weights, methods."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.runtime.small import same


class Base(nn.Module):
    def scores(self, x: Tensor) -> Tensor:
        return self(x) * 2


class Model(Base):
    """Attention with an attribute that its answer depends on, tied weights, and methods that call it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = 1.0, 0
        self.project, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head.weight = self.project.weight
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor, *, causal: bool = False) -> Tensor:
        """What it computes."""
        q = self.project(x)
        return self.head(torch.softmax(q @ q.mT * self.scale, -1) @ q) + self.shift

    def scores(self, x: Tensor) -> Tensor:
        return super().scores(x) + 1

    def twice(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.scores(self._once(x))

    def _once(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def width(self) -> int:
        return self.project.in_features

    def train(self, mode: bool = True) -> Model:
        super().train(mode)
        self.project.train(False)
        return self


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": attngraph.compile,
    "decoder": lambda model: attngraph.compile(model, cache=True),
    "compiled twice": lambda model: attngraph.compile(attngraph.compile(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_attributes_are_set_and_deleted_on_the_model(wrapper: str, model: Model, x: Tensor) -> None:
    compiled = WRAPPERS[wrapper](model)
    same(compiled(x), model(x))
    compiled.scale = 3.0
    assert model.scale == 3.0
    same(compiled(x), model(x))
    compiled.project = nn.Linear(8, 8)
    assert compiled.project is model.project
    compiled.shift = torch.ones(8)
    assert model.shift is compiled.shift and "shift" in dict(model.named_buffers())
    same(compiled(x), model(x))
    compiled.fresh = 1
    assert model.fresh == 1
    del compiled.fresh
    assert not hasattr(model, "fresh")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = compiled.nonsense


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_weights_agree_with_the_models_everywhere(wrapper: str, model: Model) -> None:
    compiled = WRAPPERS[wrapper](model)
    for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert dict(getattr(compiled, names)()) == dict(getattr(model, names)())
    assert list(compiled.state_dict()) == list(model.state_dict())
    outer = nn.ModuleDict({"inner": compiled})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in model.state_dict()]
    assert [n for n, _ in outer.named_parameters()] == ["inner.project.weight"]
    new = {name: torch.randn_like(value) for name, value in outer.state_dict().items()}
    new["inner.head.weight"] = new["inner.project.weight"]
    outer.load_state_dict(new)
    assert torch.equal(model.project.weight, new["inner.project.weight"])
    compiled.load_state_dict({f"_orig_mod.{k}": v for k, v in model.state_dict().items()})
    with pytest.raises(RuntimeError, match="Missing key"):
        compiled.load_state_dict({})


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_modes_and_dtypes_are_the_models(wrapper: str, model: Model) -> None:
    compiled = WRAPPERS[wrapper](model)
    assert nn.Sequential(compiled).train()[0] is compiled.train() is compiled
    assert model.training and compiled.training
    assert not model.project.training, "the model's own train() decides"
    compiled.training = False
    assert not model.training
    assert compiled.to(torch.float64) is compiled
    assert nn.ModuleList([compiled]).to(torch.bfloat16)[0] is compiled
    assert model.project.weight.dtype == torch.bfloat16
    assert model.head.weight is model.project.weight


def test_it_has_the_signature_and_the_class_of_the_model(model: Model) -> None:
    compiled = attngraph.compile(model)
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert compiled.forward.__doc__ == "What it computes."
    assert isinstance(compiled, Model) and isinstance(compiled, attngraph.CompiledModule)
    assert repr(compiled).startswith("CompiledModule(Model(")
    assert {"scale", "twice", "report"} <= set(dir(compiled))


def test_the_models_own_methods_run_compiled_code_where_they_call_the_model(model: Model, x: Tensor) -> None:
    compiled = attngraph.compile(model)
    same(compiled.twice(x), copy.deepcopy(model).twice(x))
    assert compiled.report.attention and model.calls == 1
    assert compiled.width.__self__ is model, "a method that does not call the model stays the model's"
    before, seen = compiled.forward, []  # a forward that is set is the wrapper's

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return before(*args, **kwargs)

    compiled.forward = forward
    same(compiled(x), model(x))
    assert seen == [1]


class Weighed(nn.Module):
    """A model with an attribute by the name of one that a compiled module has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x @ self.weights

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean() + self.weights.square().mean()


def test_a_method_that_names_an_attribute_of_both_stays_the_models_and_says_so(
    x: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model = Weighed()
    compiled = attngraph.compile(model)
    for _ in range(2):
        same(compiled.loss(x), model.loss(x))
    (record,) = caplog.records
    assert "Weighed.loss runs the uncompiled model: it uses the model's weights" in record.getMessage()


def test_copies_have_graphs_and_weights_of_their_own(model: Model, x: Tensor) -> None:
    compiled = attngraph.compile(model)
    expected = compiled(x)
    for made in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        same(made(x), expected)
        assert dict(made.named_parameters()).keys() == dict(model.named_parameters()).keys()
        made.scale = 5.0
        assert model.scale == 1.0
        with torch.no_grad():
            made.project.weight.zero_()
        assert made(x).abs().max() == 0
    same(compiled(x), expected)


def test_a_wrapped_function_keeps_its_signature_and_its_own_attributes() -> None:
    def attend(x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.softmax(x @ x.mT * scale, -1) @ x

    compiled = attngraph.compile(attend)
    assert inspect.signature(compiled.forward) == inspect.signature(attend)
    compiled.note = "mine"
    assert compiled.note == "mine" and not hasattr(attend, "note")
    assert compiled.train(False).training is False
    assert list(compiled.parameters()) == []
