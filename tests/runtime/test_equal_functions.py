"""Equal calls of torch's functions are repeated in a trace; the graph is the one of a trace of all calls."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attngraph.capture import faster, trace
from attngraph.capture.faster import functions
from attngraph.errors import CaptureError
from attngraph.ir.graph.printer import format_file
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig

LAYERS, WIDTH, CALLS = 5, 8, 15
_EMPTY = re.compile(r"\$[\w.]*lifted_tensor_\d+")
REST = (LAYERS - 2) * CALLS
"""What is repeated of a stack of layers, of which two are traced."""
COUNTER = 0
SCALES = [1.0]
SETTINGS = types.SimpleNamespace(scale=1.0)


class Layer(nn.Module):
    """A layer of `CALLS` calls of torch's functions."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def scores(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.norm(x).mT

    def forward(self, x: Tensor, *beside: Any, **named: Any) -> Any:
        p = self.scores(x).sub(1.0).mul(0.5).add(0.25).softmax(-1)
        return x + (p @ x).tanh().mul(2.0).sin().cos() * self.scale()

    def scale(self) -> Any:
        return 1.0


class Stack(nn.Module):
    """Layers of a class, one after the other."""

    def __init__(self, kind: Callable[[int], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(n) for n in range(layers))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text_and_repeats(monkeypatch: pytest.MonkeyPatch, model: Any, *args: Any) -> tuple[Any, int]:
    """The graph of a call, and how many calls of functions were repeated in its trace."""
    count, repeat = 0, functions.Recording.repeat

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return repeat(*args)

    with monkeypatch.context() as patch:
        patch.setattr(functions.Recording, "repeat", counted)
        found = trace.capture(model, args, {})
    head, text = format_file(found.graph)
    # An empty tensor that every layer makes is held once where calls are repeated.
    text = _EMPTY.sub("$empty", re.sub(r"  constant \S+: f32\[0\],\n", "", text))
    inputs = [(i.kind, i.name) for i in found.graph.inputs if not _EMPTY.fullmatch(f"${i.name}")]
    return (head, text, inputs, found.structure, found.checks), count


def repeats(monkeypatch: pytest.MonkeyPatch, model: Any, *args: Any) -> int:
    """The same, where the graph is compared with one for which every call is traced."""
    found, count = text_and_repeats(monkeypatch, model, *args)
    with monkeypatch.context() as patch:
        patch.setattr(faster, "forward", lambda *_: contextlib.nullcontext())
        expected, none = text_and_repeats(monkeypatch, model, *args)
    assert none == 0
    assert found == expected
    return count


def inputs() -> Tensor:
    """A tensor whose width is a number in the trace."""
    x = torch.randn(2, 6, WIDTH)
    torch._dynamo.mark_static(x, 2)
    return x


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_equal_layers_are_traced_twice(
    monkeypatch: pytest.MonkeyPatch, gradients: bool, training: bool
) -> None:
    config = DecoderLMConfig(vocab_size=17, layers=LAYERS, width=16, heads=2, max_tokens=32)
    with torch.set_grad_enabled(gradients):
        model = DecoderLM(config).train(training)
        assert repeats(monkeypatch, model, torch.randint(0, 17, (2, 9))) >= (LAYERS - 2) * CALLS
        # The first layer's input needs no gradient, so the calls on it are others.
        fewer = 4 if gradients else 0
        assert repeats(monkeypatch, Stack(Layer).train(training), inputs()) == REST - fewer


def test_a_size_that_a_layer_makes_a_number_is_one_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < repeats(monkeypatch, Stack(Layer), torch.randn(2, 6, WIDTH)) <= REST


class WithNumber(Layer):
    def scale(self) -> Any:
        return float(self.number % 2 + 1)


class WithVariable(Layer):
    def scale(self) -> Any:
        return COUNTER + 1


class WithContainer(Layer):
    def scale(self) -> Any:
        return SCALES[0]


class WithObject(Layer):
    def scale(self) -> Any:
        return SETTINGS.scale


class WithTable(Layer):
    def scale(self) -> Any:
        return vars(self)["number"] + 1


class WithGetattr(Layer):
    def scale(self) -> Any:
        return getattr(self, "num" + "ber") + 1


class AtThree(Layer):
    """A layer that is the same as others but for one."""

    def scale(self) -> Any:
        return 2.0 if self.number == 3 else 1.0


@pytest.mark.parametrize("kind", [WithNumber, WithTable, WithGetattr, AtThree])
def test_a_number_that_a_layer_reads_is_its_own(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    found = repeats(monkeypatch, Stack(kind), inputs())
    assert REST - LAYERS <= found <= REST  # all but the product with the number


@pytest.mark.parametrize("kind", [WithVariable, WithContainer, WithObject])
def test_what_changes_between_layers_is_seen(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """The model itself changes it back, so that the trace as a whole changes nothing."""

    class Changing(Stack):
        def forward(self, x: Tensor) -> Any:
            global COUNTER
            for number, layer in enumerate(self.layers):
                COUNTER = SCALES[0] = SETTINGS.scale = float(number // 3)
                x = layer(x)
            COUNTER = 0
            SCALES[0] = SETTINGS.scale = 1.0
            return x

    globals()["COUNTER"] = 0
    # 2.0 is also what another product on this line has, for which COUNTER + 1 is known already
    expected = 4 * CALLS if kind is WithVariable else 4 * CALLS - 2
    assert repeats(monkeypatch, Changing(kind, 6), inputs()) == expected


@pytest.mark.parametrize("place", [2, 3])
def test_a_layer_with_a_hook_or_another_attribute_differs(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    model = Stack(Layer)
    model.layers[place].inner.register_forward_hook(lambda module, args, out: out * 2)
    assert repeats(monkeypatch, model, inputs()) == REST - 1  # torch calls it from another line
    model = Stack(Layer)
    model.layers[place].norm.eps = 1e-3
    assert repeats(monkeypatch, model, inputs()) == REST - 1


def test_weights_of_other_dtypes_or_frozen_ones_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(Layer)
    model.layers[3].norm.weight.requires_grad_(False)
    with torch.enable_grad():
        assert repeats(monkeypatch, model, inputs()) == REST - 4 - 1


@pytest.mark.slow
def test_shared_modules_and_weights_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(Layer):
        def __init__(self, norm: nn.LayerNorm) -> None:
            super().__init__()
            self.norm = norm

    norm = nn.LayerNorm(WIDTH)
    assert repeats(monkeypatch, Stack(lambda n: Shared(norm)), inputs()) == REST
    tied = Stack(Layer)
    tied.layers[3].inner.weight = tied.layers[0].inner.weight
    assert repeats(monkeypatch, tied, inputs()) == REST
    inside = Stack(lambda n: Twice(n))
    inside.layers[3].other.weight = inside.layers[3].inner.weight
    assert repeats(monkeypatch, inside, inputs()) == REST + 2  # two equal calls a layer, on one line


class Twice(Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def scores(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.other(x).mT


def test_a_layer_that_is_called_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    class Again(Stack):
        def forward(self, x: Tensor) -> Any:
            for _ in range(6):
                x = self.layers[0](x)
            return x

    assert repeats(monkeypatch, Again(Layer, 1), inputs()) == 4 * CALLS


def test_layers_on_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Written(Stack):
        def forward(self, x: Tensor) -> Any:
            x = self.layers[0](x)
            x = self.layers[1](x)
            x = self.layers[2](x)
            return self.layers[3](x)

    assert repeats(monkeypatch, Written(Layer), inputs()) == 0


@pytest.mark.parametrize("beside", [lambda n, x: n, lambda n, x: x[:, : n + 1], lambda n, x: [x] * (n + 1)])
def test_arguments_that_a_layer_ignores_do_not_count(monkeypatch: pytest.MonkeyPatch, beside: Any) -> None:
    class Given(Stack):
        def forward(self, x: Tensor) -> Any:
            for number, layer in enumerate(self.layers):
                x = layer(x, beside(number, x))
            return x

    assert repeats(monkeypatch, Given(Layer), inputs()) >= REST


def test_arguments_that_are_the_same_tensor_differ_from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(Layer):
        def forward(self, x: Tensor, other: Tensor) -> Any:
            return super().forward(x) + (other if other is x else other * 2)

    class Given(Stack):
        def forward(self, x: Tensor) -> Any:
            for number, layer in enumerate(self.layers):
                x = layer(x, x if number < 3 else x + 1)
            return x

    assert repeats(monkeypatch, Given(lambda n: Pair()), inputs()) == REST + LAYERS - 2


def test_results_that_are_containers_or_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    class Several(Layer):
        def forward(self, x: Tensor, kept: Any) -> Any:
            out = super().forward(x)
            return {"out": out, "kept": (kept, None, 3), "again": out}

    class Given(Stack):
        def forward(self, x: Tensor) -> Any:
            kept = x + 1
            for layer in self.layers:
                found = layer(x, kept)
                x, kept = found["out"] + found["again"], found["kept"][0]
            return x, kept

    assert repeats(monkeypatch, Given(lambda n: Several()), inputs()) == REST + LAYERS - 2


class IntoTheInput(Layer):
    def forward(self, x: Tensor) -> Any:
        x.add_(super().forward(x))
        return x


class IntoItsOwn(Layer):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        out.mul_(2)
        out[:, 0].zero_()
        return out


class AView(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).mT.mT[:, :, :] if x.shape[-1] == WIDTH else x


class WithDropout(Layer):
    def scores(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().scores(x), 0.5, self.training)


class WithoutGradients(Layer):
    def scores(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().scores(x)


class WithAConstant(Layer):
    def scale(self) -> Any:
        return torch.tensor([2.0])


class WithABuffer(Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.full((1,), float(number)))

    def scale(self) -> Any:
        return self.kept


class IntoACache(Layer):
    """Keeps what it computed in an object that it is given, as transformers' layers do."""

    def forward(self, x: Tensor, cache: Any = None) -> Any:
        out = super().forward(x)
        cache.kept[self.number] = torch.cat([cache.kept.get(self.number, torch.tensor([])), out])
        return out


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "kind",
    [IntoTheInput, IntoItsOwn, AView, WithDropout, WithoutGradients, WithAConstant, WithABuffer],
)
def test_what_a_layer_does_to_memory(monkeypatch: pytest.MonkeyPatch, kind: Any, gradients: bool) -> None:
    class Copied(Stack):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x + 1)

    with torch.set_grad_enabled(gradients):
        assert repeats(monkeypatch, Copied(kind).train(), inputs()) >= REST - 3 * LAYERS


def test_layers_that_fill_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Filling(Stack):
        def forward(self, x: Tensor) -> Any:
            cache = types.SimpleNamespace(kept={})
            for layer in self.layers:
                x = layer(x, cache)
            return x, tuple(cache.kept.values())

    # besides a layer's own calls, an empty tensor and the joining with it
    assert repeats(monkeypatch, Filling(IntoACache), inputs()) == REST + 2 * (LAYERS - 2)


class IntoAttributes(Layer):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x).detach()
        out.requires_grad_()
        return out


def test_what_a_function_does_to_its_operand_besides_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.enable_grad(), pytest.raises(CaptureError, match="asks for gradients of a tensor"):
        repeats(monkeypatch, Stack(IntoAttributes), inputs())


class Counting(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        type(self).calls += 1
        return super().forward(x)


class Printing(Layer):
    def forward(self, x: Tensor) -> Any:
        print("here")
        return super().forward(x)


class Keeping(Layer):
    def forward(self, x: Tensor) -> Any:
        SCALES.append(1.0)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Counting, Printing, Keeping])
def test_side_effects_are_refused_as_before(kind: Any) -> None:
    with pytest.raises(CaptureError, match="forward\\(\\)"):
        trace.capture(Stack(kind), (inputs(),), {})
    assert (SCALES, Counting.calls) == ([1.0], 0)


def test_layers_in_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that differ hold layers that do not."""

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Stack(Layer, n) for n in (2, 3, 4))

        def forward(self, x: Tensor) -> Any:
            for stage in self.stages:
                x = stage(x)
            return x

    assert repeats(monkeypatch, Stages(), inputs()) == 7 * CALLS


@pytest.mark.slow
def test_one_layer_differs_from_the_others_in_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(WithDropout).train()
    model.layers[2].eval()
    assert repeats(monkeypatch, model, inputs()) == REST + LAYERS - 2 - 1


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2Model", {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32}),
        ("LlamaModel", {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 1}),
        ("BertModel", {**SMALL, "num_hidden_layers": 4}),
        (
            "T5EncoderModel",
            {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_heads": 2, "vocab_size": 32},
        ),
    ],
)
def test_stock_models(monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**options)).eval()
    assert repeats(monkeypatch, model, torch.randint(0, 32, (2, 9))) >= 2 * CALLS
