"""Equal calls of torch's functions are repeated in a trace; the graph is the one of a trace of all calls."""

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attngraph.capture import faster, trace
from attngraph.capture.faster import functions
from attngraph.errors import CaptureError
from attngraph.ir.graph.printer import format_file
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig

LAYERS, WIDTH, CALLS = 5, 8, 10
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
        p = self.scores(x).sub(1.0).softmax(-1)
        return x + (p @ x).tanh() * self.scale()

    def scale(self) -> Any:
        return 1.0


def kind(base: type[Layer] = Layer, **methods: Callable[..., Any]) -> type[Layer]:
    """A class of layers with other methods."""
    return type("Other", (base,), methods)


class Stack(nn.Module):
    """Layers of a class, one after the other: `go` is what is done from one to the next."""

    def __init__(
        self, kind: Callable[[int], nn.Module] = Layer, layers: int = LAYERS, go: Any = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(n) for n in range(layers))
        self.__dict__["go"] = go

    def forward(self, x: Tensor) -> Any:
        if self.go is not None:
            return self.go(self.layers, x)
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
    config = DecoderLMConfig(vocab_size=17, layers=4, width=8, heads=2, max_tokens=32)
    with torch.set_grad_enabled(gradients):
        model = DecoderLM(config).train(training)
        assert repeats(monkeypatch, model, torch.randint(0, 17, (2, 9))) >= 2 * CALLS
        # The first layer's input needs no gradient, so the calls on it are others.
        fewer = 4 if gradients else 0
        assert repeats(monkeypatch, Stack().train(training), inputs()) == REST - fewer


def test_a_size_that_a_layer_makes_a_number_is_one_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < repeats(monkeypatch, Stack(), torch.randn(2, 6, WIDTH)) <= REST


# --- what a layer reads ---


READS: dict[str, Callable[[Any], Any]] = {
    "its number": lambda layer: float(layer.number % 2 + 1),
    "its dictionary": lambda layer: vars(layer)["number"] + 1,
    "by getattr": lambda layer: getattr(layer, "num" + "ber") + 1,
    "one of them": lambda layer: 2.0 if layer.number == 3 else 1.0,
}


def _changing(layers: Any, x: Tensor) -> Tensor:
    """Changes back what it changes, so that the trace as a whole changes nothing."""
    global COUNTER
    for number, layer in enumerate(layers):
        COUNTER = SCALES[0] = SETTINGS.scale = float(number // 3)
        x = layer(x)
    COUNTER = 0
    SCALES[0] = SETTINGS.scale = 1.0
    return x


def _hooked(model: Any, place: int) -> None:
    model.layers[place].inner.register_forward_hook(lambda module, args, out: out * 2)


def _other_attribute(model: Any, place: int) -> None:
    model.layers[place].norm.eps = 1e-3


def changed(change: Callable[[Any, int], None], place: int) -> nn.Module:
    model = Stack()
    change(model, place)
    return model


def test_weights_of_other_dtypes_or_frozen_ones_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    model.layers[3].norm.weight.requires_grad_(False)
    with torch.enable_grad():
        assert repeats(monkeypatch, model, inputs()) == REST - 4 - 1


class Twice(Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def scores(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.other(x).mT


@pytest.mark.slow
def test_shared_modules_and_weights_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.LayerNorm(WIDTH)
    shared = Stack()
    for layer in shared.layers:
        layer.norm = norm
    assert repeats(monkeypatch, shared, inputs()) == REST
    tied = Stack()
    tied.layers[3].inner.weight = tied.layers[0].inner.weight
    assert repeats(monkeypatch, tied, inputs()) == REST
    inside = Stack(Twice)
    inside.layers[3].other.weight = inside.layers[3].inner.weight
    assert repeats(monkeypatch, inside, inputs()) == REST + 2  # two equal calls a layer, on one line


WithDropout = kind(scores=lambda self, x: F.dropout(Layer.scores(self, x), 0.5, self.training))


@pytest.mark.slow
def test_one_layer_differs_from_the_others_in_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(WithDropout).train()
    model.layers[2].eval()
    assert repeats(monkeypatch, model, inputs()) == REST + LAYERS - 2 - 1


def _again(layers: Any, x: Tensor) -> Tensor:
    for _ in range(6):
        x = layers[0](x)
    return x


def _on_lines_of_their_own(layers: Any, x: Tensor) -> Tensor:
    x = layers[0](x)
    x = layers[1](x)
    x = layers[2](x)
    return layers[3](x)  # type: ignore[no-any-return]


def _beside(given: Callable[[int, Tensor], Any]) -> Callable[..., Tensor]:
    """Gives each layer another argument beside, which it may ignore."""

    def go(layers: Any, x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            x = layer(x, given(number, x))
        return x

    return go


def _of_two(self: Any, x: Tensor, other: Tensor) -> Tensor:
    return Layer.forward(self, x) + (other if other is x else other * 2)  # type: ignore[no-any-return]


def _several(self: Any, x: Tensor, kept: Any) -> dict[str, Any]:
    out = Layer.forward(self, x)
    return {"out": out, "kept": (kept, None, 3), "again": out}


def _from_containers(layers: Any, x: Tensor) -> Any:
    kept = x + 1
    for layer in layers:
        found = layer(x, kept)
        x, kept = found["out"] + found["again"], found["kept"][0]
    return x, kept


def _into_a_cache(self: Any, x: Tensor, cache: Any = None) -> Tensor:
    """Keeps what it computed in an object that it is given, as transformers' layers do."""
    out: Tensor = Layer.forward(self, x)
    cache.kept[self.number] = torch.cat([cache.kept.get(self.number, torch.tensor([])), out])
    return out


def _filling(layers: Any, x: Tensor) -> Any:
    cache = types.SimpleNamespace(kept={})
    for layer in layers:
        x = layer(x, cache)
    return x, tuple(cache.kept.values())


BUT_ONE = REST - LAYERS, REST
"""All but the product with a number may be repeated."""
STACKS: dict[str, tuple[Callable[[], nn.Module], int | tuple[int, int]]] = {
    "one that has a hook": (lambda: changed(_hooked, 3), REST - 1),  # torch calls it from another line
    "what a global object holds changes": (
        lambda: Stack(kind(scale=lambda _: SETTINGS.scale), 6, _changing), 4 * CALLS - 2
    ),
    "stages that differ of layers that do not": (
        lambda: nn.Sequential(*(Stack(Layer, n) for n in (2, 3, 4))), 7 * CALLS
    ),
    **{
        f"a number that it reads: {name}": (lambda read=read: Stack(kind(scale=read)), BUT_ONE)
        for name, read in READS.items()
    },
    # the product with another number, and the sum with it, are traced anew
    "a global variable changes": (
        lambda: Stack(kind(scale=lambda _: COUNTER + 1), 6, _changing), 4 * CALLS - 2
    ),
    "a global list changes": (lambda: Stack(kind(scale=lambda _: SCALES[0]), 6, _changing), 4 * CALLS - 2),
    "another attribute": (lambda: changed(_other_attribute, 3), REST - 1),
    "the first of the rest has a hook": (lambda: changed(_hooked, 2), REST - 1),
    "another attribute of the first of the rest": (lambda: changed(_other_attribute, 2), REST - 1),
    "a layer that is called several times": (lambda: Stack(Layer, 1, _again), 4 * CALLS),
    "layers on lines of their own": (lambda: Stack(go=_on_lines_of_their_own), 0),
    "numbers beside do not count": (lambda: Stack(go=_beside(lambda n, x: n)), REST),
    "lists beside do not count": (lambda: Stack(go=_beside(lambda n, x: [x] * (n + 1))), REST),
    "parts of tensors beside do not count": (
        lambda: Stack(go=_beside(lambda n, x: x[:, : n + 1])), (REST, 2 * REST)
    ),
    "the same tensor differs from two": (
        lambda: Stack(kind(forward=_of_two), go=_beside(lambda n, x: x if n < 3 else x + 1)),
        REST + LAYERS - 2,
    ),
    "results that are containers or operands": (
        lambda: Stack(kind(forward=_several), go=_from_containers), REST + LAYERS - 2
    ),
    # besides a layer's own calls, an empty tensor and the joining with it
    "layers that fill a cache": (
        lambda: Stack(kind(forward=_into_a_cache), go=_filling), REST + 2 * (LAYERS - 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_what_is_equal_in_layers_is_repeated_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, expected = STACKS[name]
    low, high = expected if isinstance(expected, tuple) else (expected, expected)
    globals()["COUNTER"] = 0
    assert low <= repeats(monkeypatch, make(), inputs()) <= high


# --- what a layer does to memory, and besides ---


def _into_its_own(self: Any, x: Tensor) -> Tensor:
    out: Tensor = Layer.forward(self, x)
    out.mul_(2)
    out[:, 0].zero_()
    return out


def _a_view(self: Any, x: Tensor) -> Tensor:
    return Layer.forward(self, x).mT.mT[:, :, :] if x.shape[-1] == WIDTH else x


def _without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return Layer.scores(self, x)


class WithABuffer(Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("kept", torch.full((1,), float(number)))

    def scale(self) -> Any:
        return self.kept


MEMORY: dict[str, type[Layer]] = {
    "into the input": kind(forward=lambda self, x: x.add_(Layer.forward(self, x))),
    "into its own": kind(forward=_into_its_own),
    "a view": kind(forward=_a_view),
    "dropout": WithDropout,
    "no gradients": kind(scores=_without_gradients),
    "a constant": kind(scale=lambda _: torch.tensor([2.0])),
    "a buffer": WithABuffer,
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", MEMORY)
def test_what_a_layer_does_to_memory(monkeypatch: pytest.MonkeyPatch, name: str, gradients: bool) -> None:
    model = nn.Sequential(nn.Identity(), Stack(MEMORY[name])).train()
    with torch.set_grad_enabled(gradients):
        assert repeats(monkeypatch, lambda x: model(x + 1), inputs()) >= REST - 3 * LAYERS


def _asks_for_gradients(self: Any, x: Tensor) -> Tensor:
    return Layer.forward(self, x).detach().requires_grad_()  # type: ignore[no-any-return]


def _counts(self: Any, x: Tensor) -> Any:
    SETTINGS.scale += 1
    return Layer.forward(self, x)


def _prints(self: Any, x: Tensor) -> Any:
    print("here")
    return Layer.forward(self, x)


def _keeps(self: Any, x: Tensor) -> Any:
    SCALES.append(1.0)
    return Layer.forward(self, x)


@pytest.mark.parametrize("forward", [_asks_for_gradients, _counts, _prints, _keeps])
def test_side_effects_are_refused_as_before(forward: Any) -> None:
    what = "asks for gradients of a tensor" if forward is _asks_for_gradients else "forward\\(\\)"
    with torch.enable_grad(), pytest.raises(CaptureError, match=what):
        trace.capture(Stack(kind(forward=forward)), (inputs(),), {})
    assert (SCALES, SETTINGS.scale) == ([1.0], 1.0)


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
LAYERED = {**SMALL, "num_hidden_layers": 4}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_heads": 2, "vocab_size": 32}
STOCK: dict[str, dict[str, Any]] = {
    "GPT2Model": {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32},
    "LlamaModel": {**LAYERED, "num_key_value_heads": 1}, "BertModel": LAYERED, "T5EncoderModel": T5,
}  # fmt: skip


@pytest.mark.parametrize("name", STOCK)
def test_stock_models(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, name)
    model = model(model.config_class(**STOCK[name])).eval()
    assert repeats(monkeypatch, model, torch.randint(0, 32, (2, 9))) >= 2 * CALLS
