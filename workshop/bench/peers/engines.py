"""The candidates that convert a model: OpenVINO and onnxruntime, each with threads as many as torch has.

OpenVINO runs in two forms: with the keys and values as its own state, which its attention over a cache is
made for, and with them as inputs and outputs. Both keep to float32, where OpenVINO would take bfloat16 for
products and bytes for a cache on processors that have them.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class WithPast(nn.Module):
    """A model as a pure function: tokens and each layer's keys and values to logits and longer ones.

    `beams` picks the rows of the past (`[B]`); engines that keep the past as state know it by this input.
    """

    def __init__(self, model: Any, has_beams: bool = False) -> None:
        super().__init__()
        self.model, self.has_beams = model, has_beams

    def forward(self, ids: Any, *rest: Any) -> tuple[Any, ...]:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        from attngraph.hf import CACHE

        past = list(rest)
        if self.has_beams:
            beams = past.pop(0)
            past = [p.index_select(0, beams) for p in past]
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = keys.dtype, keys.device
            cache.layers.append(layer)
        kept, new = past[0].shape[2], ids.shape[1]
        positions = torch.arange(new) + kept
        mask = (torch.arange(kept + new)[None] <= positions[:, None])[None, None]
        found = self.model(
            ids, attention_mask=mask, position_ids=positions[None], **{CACHE: cache}, use_cache=True
        )
        return found.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))


def past_of(model: Any, rows: int, kept: int) -> list[Tensor]:
    """Keys and values of every layer, as `WithPast` takes them."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = config.hidden_size // config.num_attention_heads
    return [torch.zeros(rows, heads, kept, width) for _ in range(2 * config.num_hidden_layers)]


class OpenVINOState:
    """OpenVINO with the past as its state."""

    def __init__(self, model: Any) -> None:
        self.openvino, self.model = importlib.import_module("openvino"), model
        found = _converted(self.openvino, WithPast(model, has_beams=True), model, [torch.arange(2)])
        inputs, outputs = _names(found, has_beams=True)
        passes = importlib.import_module("openvino._offline_transformations")
        passes.apply_make_stateful_transformation(found, dict(zip(inputs, outputs, strict=True)))
        self.request = _compiled(self.openvino, found).create_infer_request()
        self.saved: list[Any] = []
        self.beams: Any = None

    def begin(self, rows: int, room: int) -> None:
        self.beams, self.saved = torch.arange(rows, dtype=torch.int32).numpy(), []
        for state, empty in zip(self.request.query_state(), past_of(self.model, rows, 0), strict=True):
            state.state = self.openvino.Tensor(empty.numpy())

    def advance(self, ids: Tensor) -> Tensor:
        self.request.infer({0: ids.numpy(), 1: self.beams}, share_inputs=True, share_outputs=True)
        return torch.from_numpy(self.request.get_output_tensor(0).data)

    def rewind(self, kept: int) -> None:
        if not self.saved:
            self.saved = [s.state.data[:, :, :kept].copy() for s in self.request.query_state()]
        for state, value in zip(self.request.query_state(), self.saved, strict=True):
            state.state = self.openvino.Tensor(value)


class OpenVINOPast:
    """OpenVINO with the past as inputs and outputs. Two requests take turns, so that the results of one are
    the inputs of the other without a copy."""

    def __init__(self, model: Any) -> None:
        self.openvino, self.model = importlib.import_module("openvino"), model
        found = _converted(self.openvino, WithPast(model), model, [])
        compiled = _compiled(self.openvino, found)
        self.requests = [compiled.create_infer_request() for _ in range(2)]
        self.past: list[Any] = []

    def begin(self, rows: int, room: int) -> None:
        self.past = [self.openvino.Tensor(t.numpy()) for t in past_of(self.model, rows, 0)]

    def advance(self, ids: Tensor) -> Tensor:
        request = self.requests[0]
        self.requests.reverse()
        request.set_input_tensor(0, self.openvino.Tensor(ids.numpy()))
        for place, value in enumerate(self.past):
            request.set_input_tensor(1 + place, value)
        request.infer()
        self.past = [request.get_output_tensor(1 + place) for place in range(len(self.past))]
        return torch.from_numpy(request.get_output_tensor(0).data)

    def rewind(self, kept: int) -> None:
        self.past = [self.openvino.Tensor(p.data[:, :, :kept].copy()) for p in self.past]


def _converted(openvino: Any, module: WithPast, model: Any, beams: Sequence[Tensor]) -> Any:
    example = (torch.zeros(2, 3, dtype=torch.int64), *beams, *past_of(model, 2, 4))
    return openvino.convert_model(module, example_input=example)


def _names(found: Any, has_beams: bool) -> tuple[list[str], list[str]]:
    """Names for the inputs and outputs of the past, and for those before them."""
    before = 2 if has_beams else 1
    for tensors, first, kind in ((found.inputs, before, "past"), (found.outputs, 1, "present")):
        for place, tensor in enumerate(tensors):
            tensor.get_tensor().set_names({f"{kind}{place - first}"})
    count = len(found.outputs) - 1
    return [f"past{n}" for n in range(count)], [f"present{n}" for n in range(count)]


def _compiled(openvino: Any, found: Any) -> Any:
    options = {
        "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }  # fmt: skip
    return openvino.Core().compile_model(found, "CPU", options)


def whole_openvino(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor]]:
    """The first result of a model's call, by OpenVINO."""
    openvino = importlib.import_module("openvino")
    request = _compiled(
        openvino, openvino.convert_model(First(model), example_input=inputs)
    ).create_infer_request()

    def call(*given: Tensor) -> tuple[Tensor]:
        request.infer([t.numpy() for t in given], share_inputs=True, share_outputs=True)
        return (torch.from_numpy(request.get_output_tensor(0).data),)

    return call


def whole_onnxruntime(model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor]]:
    """The same by onnxruntime."""
    runtime = importlib.import_module("onnxruntime")
    session = _session(runtime, lambda: torch.onnx.export(First(model), inputs, dynamo=True, verbose=False))
    names = [i.name for i in session.get_inputs()]

    def call(*given: Tensor) -> tuple[Tensor]:
        found = session.run(None, dict(zip(names, (t.numpy() for t in given), strict=True)))
        return (torch.from_numpy(found[0]),)

    return call


class First(nn.Module):
    """A model that gives its first result alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Any:
        return self.model(*args)[0]


def _session(runtime: Any, export: Callable[[], Any]) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export().save(str(path), external_data=True)
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class OnnxRuntime:
    """onnxruntime with the past as inputs and outputs, bound where the last call left them."""

    def __init__(self, model: Any) -> None:
        self.runtime, self.model = importlib.import_module("onnxruntime"), model
        self.session = _session(self.runtime, self._exported)
        self.inputs = [i.name for i in self.session.get_inputs()]
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.past: list[Any] = []

    def _exported(self) -> Any:
        past = past_of(self.model, 2, 4)
        rows, new, kept = (torch.export.Dim(n, min=0, max=1 << 16) for n in ("rows", "new", "kept"))
        return torch.onnx.export(
            WithPast(self.model), (torch.zeros(2, 3, dtype=torch.int64), *past), dynamo=True, verbose=False,
            dynamic_shapes=({0: rows, 1: new}, tuple({0: rows, 2: kept} for _ in past)),
        )  # fmt: skip

    def begin(self, rows: int, room: int) -> None:
        value = self.runtime.OrtValue.ortvalue_from_numpy
        self.past = [value(t.numpy()) for t in past_of(self.model, rows, 0)]

    def advance(self, ids: Tensor) -> Tensor:
        binding = self.session.io_binding()
        binding.bind_cpu_input(self.inputs[0], ids.numpy())
        for name, value in zip(self.inputs[1:], self.past, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        logits, *self.past = binding.get_outputs()
        return torch.from_numpy(logits.numpy())

    def rewind(self, kept: int) -> None:
        value = self.runtime.OrtValue.ortvalue_from_numpy
        self.past = [value(p.numpy()[:, :, :kept].copy()) for p in self.past]
