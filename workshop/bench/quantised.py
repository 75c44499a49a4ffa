"""Decoding with fewer bytes on the CPU: attngraph's decoders of a model in float32, in bfloat16, in int8 by
torchao, and with integers of 4 bits by hand, two in a byte (torchao packs none on a CPU).

    python -m workshop.bench.quantised [--models gpt2 llama] [--batches 1 8] [--small] [--json F]

Random weights. GPT-2's layers are converted to `nn.Linear` first, because torchao quantises no others. All
decoders are timed in turns within one run, beside their floors: the bytes of all weights that a token reads,
over the speed at which this machine reads memory in the same run. Greedy tokens of the quantised decoders are
compared with those of the quantised models themselves.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from workshop.bench.decoding import gpt2, llama

PROMPT, TOKENS, SKIPPED, COMPARED = 128, 60, 5, 16
GROUP = 128
"""So many inputs have one scale in 4 bits; fewer, if a layer has no more."""


def small() -> nn.Module:
    """A GPT-2 of two narrow layers, to see that everything runs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=200, n_embd=64, n_layer=2, n_head=4, n_positions=512, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    found: nn.Module = model
    return found


MODELS: Mapping[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "small": small}


class PackedLinear(nn.Module):
    """A layer with integers of 4 bits: inputs 0 and 1 in the first byte, the first in its low bits."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.group = min(GROUP, source.in_features)
        parts = source.weight.detach().view(source.out_features, -1, self.group)
        scale = parts.abs().amax(-1, keepdim=True) / 7
        whole = (parts / scale).round().add(8).flatten(1).to(torch.uint8)
        self.weight = nn.Buffer(whole[:, ::2] | whole[:, 1::2] << 4)
        self.scale, self.bias = nn.Buffer(scale), source.bias

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1)
        parts = (whole.to(x.dtype) - 8).view(len(whole), -1, self.group)
        return F.linear(x, (parts * self.scale).flatten(1), self.bias)


def packed(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with all its linear layers in packed integers of 4 bits."""
    return _replaced(_with_linears(make()), "Linear", PackedLinear).requires_grad_(False)


def quantised(make: Callable[[], nn.Module]) -> nn.Module:
    """The model with all its linear layers in int8, by torchao.

    Raises:
        SystemExit: torchao is not installed.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise SystemExit('this needs torchao: pip install "attngraph[torchao]"') from None
    model = _with_linears(make()).requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _with_linears(model: nn.Module) -> nn.Module:
    """Transformers' Conv1D, which has a weight `[in, out]`, as nn.Linear."""

    def linear(source: Any) -> nn.Linear:
        made = nn.Linear(*source.weight.shape)
        made.weight, made.bias = nn.Parameter(source.weight.detach().T.contiguous()), source.bias
        return made

    return _replaced(model, "Conv1D", linear)


def _replaced(model: nn.Module, kind: str, by: Callable[[Any], nn.Module]) -> nn.Module:
    """The model with other modules in place of those of a class."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == kind:
                setattr(module, name, by(child))
    return model


KINDS: Mapping[str, Callable[[Callable[[], nn.Module]], nn.Module]] = {
    "float32": lambda make: make(), "bfloat16": lambda make: make().bfloat16(), "int8": quantised,
    "int4": packed,
}  # fmt: skip
QUANTISED = ("int8", "int4")


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights of all linear layers, which one token of each row reads once."""
    kinds = ("Linear", "Conv1D", "PackedLinear")
    layers = [m for m in model.modules() if type(m).__name__ in kinds]
    return sum(_bytes(m.weight) + _bytes(getattr(m, "scale", None)) for m in layers)


def _bytes(weight: Any) -> int:
    if weight is None:
        return 0
    if hasattr(weight, "__tensor_flatten__"):
        return sum(_bytes(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])
    return int(weight.numel() * weight.element_size())


def bandwidth(size: int = 1 << 28) -> float:
    """Bytes per second at which all threads read memory: the best of some sums of a large tensor."""
    data = torch.ones(size // 4)
    spent = []
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        spent.append(time.perf_counter() - start)
    return size / min(spent)


def one_token(decoders: Mapping[str, attngraph.Decoder], ids: Tensor, count: int) -> dict[str, float]:
    """Median milliseconds for one token of every row, in turns."""
    states = {name: decoder.prefill(ids)[1] for name, decoder in decoders.items()}
    ways = {
        name: functools.partial(decoder.decode, ids[:, -1:], states[name])
        for name, decoder in decoders.items()
    }
    return median_times(ways, count)


def median_times(ways: Mapping[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """Median milliseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent[SKIPPED:]) * 1000 for name, spent in times.items()}


def agreement(model: Any, decoder: attngraph.Decoder, ids: Tensor, count: int) -> float:
    """The part of the greedy tokens that are those of the model itself, run by transformers."""
    wanted = model.generate(ids, max_new_tokens=count, do_sample=False)
    found = decoder.generate(ids, max_new_tokens=count)
    return float((found == wanted)[:, ids.shape[1] :].float().mean())


def measure(name: str, batches: Sequence[int], prompt: int, count: int) -> dict[str, Any]:
    """The figures of one model, printed as well."""
    models: dict[str, Any] = {}
    for kind, make in KINDS.items():
        torch.manual_seed(0)
        models[kind] = make(MODELS[name])
    decoders = {kind: attngraph.compile(model, cache=True) for kind, model in models.items()}
    vocabulary = int(models["float32"].config.vocab_size)
    found: dict[str, Any] = {"weight bytes": {kind: weight_bytes(model) for kind, model in models.items()}}
    for rows in batches:
        ids = torch.randint(0, vocabulary, (rows, prompt))
        times = one_token(decoders, ids, count)
        speed = bandwidth()
        floors = {kind: size / speed * 1000 for kind, size in found["weight bytes"].items()}
        print(f"{name}, batch {rows}, milliseconds of one token after {prompt}, at {speed / 1e9:.1f} GB/s:")
        for kind, spent in times.items():
            print(f"  {kind:8} {spent:8.2f}   floor {floors[kind]:8.2f}   {spent / floors[kind]:.2f} of it")
        for kind in list(KINDS)[1:]:
            print(f"  {kind} is {times['float32'] / times[kind]:.2f} times as fast", flush=True)
        found[f"batch {rows}"] = {"one token": times, "floor": floors, "bytes per second": speed}
    ids = torch.randint(0, vocabulary, (1, 16))
    same = {kind: agreement(models[kind], decoders[kind], ids, COMPARED) for kind in QUANTISED}
    for kind, part in same.items():
        print(f"{name}, {kind}: {part:.0%} of {COMPARED} greedy tokens are the model's own", flush=True)
    return {**found, "agreement": same}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["gpt2", "llama"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    names, prompt, count = (["small"], 8, SKIPPED + 3) if options.small else (options.models, PROMPT, TOKENS)
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with torch.no_grad():
        for name in names:
            results[name] = measure(name, options.batches, prompt, count)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
