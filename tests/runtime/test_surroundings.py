"""Numbers that a model reads from outside of itself: objects among its arguments, its classes, globals that
its forward names. A compiled model sees every change of them, and keeps none of a trace's own tensors."""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig

Same = Callable[..., None]
SCALE = 1.0
TABLE = {"scale": 1.0}


def attend(x: Tensor, scale: float) -> Tensor:
    return torch.softmax(x @ x.mT * scale, -1) @ x


@dataclasses.dataclass
class Options:
    scale: float = 1.0


class Plain:
    def __init__(self) -> None:
        self.scale = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


THINGS: dict[str, Callable[[], Any]] = {
    "a dataclass": Options,
    "a plain object": Plain,
    "an object with slots": Slotted,
    "a namespace": lambda: types.SimpleNamespace(scale=1.0),
}


@pytest.mark.parametrize("name", THINGS)
def test_an_object_among_the_arguments_may_change(name: str, x: Tensor, same: Same) -> None:
    options = THINGS[name]()
    compiled = attngraph.compile(lambda x, options: attend(x, options.scale))
    for scale in (1.0, 3.0, 1.0):
        options.scale = scale
        same(compiled(x, options), attend(x, scale))
    assert compiled.report.graphs == 2


def test_a_set_among_the_arguments_may_change(x: Tensor, same: Same) -> None:
    chosen = {1}
    compiled = attngraph.compile(lambda x, chosen: attend(x, float(sum(chosen))))
    same(compiled(x, chosen), attend(x, 1.0))
    chosen.add(2)
    same(compiled(x, chosen), attend(x, 3.0))


class Scaled(nn.Module):
    """Attention times what `read` gives."""

    scale: ClassVar[float] = 1.0

    def __init__(self, given: Any = None) -> None:
        super().__init__()
        self.given = given


class OfItsClass(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x, self.scale)


class OfAnObjectsClass(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x, self.given.scale)


class OfAGlobal(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x, SCALE)


class OfAGlobalTable(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x, TABLE["scale"])


class OfAModule(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x, HERE.SCALE)  # type: ignore[attr-defined]


class Fixed:
    scale = 1.0


HERE = sys.modules[__name__]
PLACES: dict[str, tuple[Callable[[], nn.Module], Callable[[pytest.MonkeyPatch], None]]] = {
    "its class": (OfItsClass, lambda patch: patch.setattr(Scaled, "scale", 3.0)),
    "the class of an object": (
        lambda: OfAnObjectsClass(Fixed()),
        lambda patch: patch.setattr(Fixed, "scale", 3.0),
    ),
    "a class": (lambda: OfAnObjectsClass(Fixed), lambda patch: patch.setattr(Fixed, "scale", 3.0)),
    "a global": (OfAGlobal, lambda patch: patch.setattr(HERE, "SCALE", 3.0)),
    "a global table": (OfAGlobalTable, lambda patch: patch.setitem(TABLE, "scale", 3.0)),
    "a module": (OfAModule, lambda patch: patch.setattr(HERE, "SCALE", 3.0)),
    "its forward": (
        OfItsClass,
        lambda patch: patch.setattr(OfItsClass, "forward", lambda self, x: attend(x, 3.0)),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_a_forward_reads_around_it_may_change(
    name: str, x: Tensor, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, change = PLACES[name]
    compiled = attngraph.compile(make())
    same(compiled(x), attend(x, 1.0))
    change(monkeypatch)
    same(compiled(x), attend(x, 3.0))


@pytest.mark.slow
def test_an_object_of_another_class_at_the_same_address_is_another(x: Tensor, same: Same) -> None:
    kinds = [type(f"Times{n}", (), {"of": lambda self, s, n=n: s * n}) for n in range(2, 7)]

    class Model(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return attend(x, self.given.of(1.0))

    model = Model()
    compiled = attngraph.compile(model)
    for n, kind in enumerate(kinds, 2):
        model.given = None
        gc.collect()
        model.given = kind()
        same(compiled(x), attend(x, float(n)))


class Cache:
    """What users write to keep keys in."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        return self.keys


def test_an_empty_cache_among_the_arguments_is_filled_at_every_call(same: Same) -> None:
    def step(x: Tensor, cache: Cache) -> Tensor:
        keys = cache.update(x)
        return torch.softmax(x @ keys.mT, -1) @ keys

    compiled, mine, eagers = attngraph.compile(step), Cache(), Cache()
    nothing = types.SimpleNamespace(update=lambda keys: keys)
    for _ in range(3):
        x = torch.randn(2, 2, 8)
        same(compiled(x, mine), step(x, eagers))
        same(mine.keys, eagers.keys)
    same(compiled(x, nothing), step(x, nothing))
    assert compiled._graphs, "a call that changes nothing is captured whole"


CALLS: Counter[str] = Counter()


def test_a_counter_beside_the_model_counts_every_call(x: Tensor, same: Same) -> None:
    class Counting(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            CALLS["forward"] += 1
            return attend(x, 1.0)

    compiled = attngraph.compile(Counting())
    for _ in range(3):
        same(compiled(x), attend(x, 1.0))
    assert CALLS["forward"] == 3


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT + self.bias, -1) @ x


@pytest.mark.parametrize("late", [False, True], ids=["from the beginning", "after compiling"])
def test_a_buffer_that_wants_a_gradient_gets_one(late: bool, x: Tensor, same: Same) -> None:
    model = Biased()
    compiled = attngraph.compile(model)
    if late:
        compiled(x)
    model.bias.requires_grad_()
    found = [torch.autograd.grad(run(x).square().sum(), model.bias)[0] for run in (compiled, model)]
    same(*found)
    assert len(compiled.report.attention) == 1


def test_a_range_of_floats_gives_sizes_that_can_be_checked(same: Same) -> None:
    """Transformer-XL counts distances down with `torch.arange(T - 1, -1, -1.0)`."""

    def decaying(x: Tensor) -> Tensor:
        far = torch.arange(x.shape[1] - 1, -1, -1.0)
        return torch.softmax(x @ x.mT - far.view(1, 1, x.shape[1]), -1) @ x

    compiled = attngraph.compile(decaying)
    for tokens in (5, 7):
        x = torch.randn(2, tokens, 8)
        same(compiled(x), decaying(x))


def test_what_a_model_asserts_of_values_is_asserted(x: Tensor) -> None:
    def checked(x: Tensor, mask: Tensor) -> Tensor:
        assert mask.any(), "nothing is left"
        return torch.softmax((x @ x.mT).masked_fill(~mask, -1e9), -1) @ x

    compiled = attngraph.compile(checked)
    compiled(x, torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises((AssertionError, RuntimeError), match="nothing is left"):
        compiled(x, torch.zeros(5, 5, dtype=torch.bool))
    assert len(compiled.report.attention) == 1


def test_a_compiled_model_runs_inside_other_traces(layer: type[nn.Module], x: Tensor, same: Same) -> None:
    model = layer()
    compiled = attngraph.compile(model)
    compiled(x)
    longer = torch.randn(2, 9, 8)
    same(torch.jit.trace(compiled, (x,))(longer), model(longer))
    with FakeTensorMode() as mode:
        mode.allow_non_fake_inputs = True
        assert compiled(mode.from_tensor(x)).shape == x.shape
    assert attngraph.compile(model.to("meta"))(x.to("meta")).shape == x.shape


@pytest.mark.parametrize("tokens_on", ["cpu", "meta"])
def test_a_compiled_model_can_be_moved_to_the_device_without_values(tokens_on: str) -> None:
    model = DecoderLM(DecoderLMConfig(vocab_size=50, layers=1, width=32, heads=4)).eval()
    compiled, tokens = attngraph.compile(model), torch.randint(0, 50, (2, 7))
    compiled(tokens)
    result = compiled.to("meta")(tokens.to(tokens_on))
    assert result.shape == (2, 7, 50) and result.is_meta


@pytest.mark.parametrize("bound", [False, True])
def test_code_for_files_does_not_run_in_a_graph_that_serves_calls(bound: bool, x: Tensor, same: Same) -> None:
    from torch.compiler import is_exporting

    def model(x: Tensor) -> Tensor:
        scale = 2.0 if (is_exporting() if bound else torch.compiler.is_exporting()) else 3.0
        return torch.softmax(x @ x.mT * scale, -1) @ x

    same(attngraph.compile(model, min_scores=0)(x), model(x))
