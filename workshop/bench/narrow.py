"""Decoding with fewer bytes on the CPU: weights of 16, 8 and 4 bits, and caches of 8.

    python -m workshop quantised [--models gpt2 llama] [--batches 1 8] [--json FILE]
    python -m workshop narrow-caches [--models gpt2 llama] [--tokens 8192] [--layers 12] [--json FILE]

Random weights. quantised: attngraph's decoders of a model in float32, in bfloat16, in int8 by torchao, and
with integers of 4 bits by hand, two in a byte (torchao packs none on a CPU). GPT-2's layers are converted to
`nn.Linear` first, because torchao quantises no others. Floors are the bytes of all weights that a token
reads, over the speed at which this machine reads memory in the same run. Greedy tokens of the quantised
decoders are compared with those of the quantised models themselves. narrow-caches: what a kept token takes,
and one new token over many kept ones; for four stock models of 4 layers how far rounding in the cache moves
the logits, which differ by about one.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from workshop.bench import models
from workshop.harness import Cell, Options, Row, Suite, in_turns

SKIPPED, COMPARED = 5, 16
GROUP = 128
"""So many inputs have one scale in 4 bits; fewer, if a layer has no more."""


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
        raise SystemExit("this needs torchao: pip install torchao") from None
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
    return float(size / min(in_turns({"read": data.sum}, 1)["read"]["seconds"] for _ in range(8)))


class Kinds:
    """A model with each kind of weights, and its decoders, made when they are first needed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    @functools.cached_property
    def models(self) -> dict[str, Any]:
        return {kind: models.made(functools.partial(turn, self.make)) for kind, turn in KINDS.items()}

    @functools.cached_property
    def decoders(self) -> dict[str, attngraph.Decoder]:
        return {kind: attngraph.compile(model, cache=True) for kind, model in self.models.items()}

    def ids(self, rows: int, tokens: int) -> Tensor:
        return torch.randint(0, int(self.models["float32"].config.vocab_size), (rows, tokens))

    def one_token(self, rows: int, prompt: int, calls: int) -> dict[str, Row]:
        ids = self.ids(rows, prompt)
        found = in_turns(_steps(self.decoders, ids)[0], calls, SKIPPED)
        speed = bandwidth()
        for kind, row in found.items():
            size = weight_bytes(self.models[kind])
            row |= {"bytes": size, "floor": size / speed, "gbytes": speed / 1e9}
        return found

    def greedy(self) -> dict[str, Row]:
        """The part of the greedy tokens that are those of the quantised model itself, run by transformers."""
        ids, found = self.ids(1, 16), {}
        for kind in QUANTISED:
            wanted = self.models[kind].generate(ids, max_new_tokens=COMPARED, do_sample=False)
            same = self.decoders[kind].generate(ids, max_new_tokens=COMPARED) == wanted
            found[kind] = {"equal": float(same[:, ids.shape[1] :].float().mean())}
        return found


def _steps(
    decoders: Mapping[str, attngraph.Decoder], ids: Tensor
) -> tuple[dict[str, Callable[[], Any]], dict[str, attngraph.KVCache]]:
    """What computes one more token after a prompt, and the states that hold it."""
    states = {name: decoder.prefill(ids)[1] for name, decoder in decoders.items()}
    return {n: functools.partial(d.decode, ids[:, -1:], states[n]) for n, d in decoders.items()}, states


def quantised_cells(options: Options) -> Iterator[Cell]:
    prompt, calls = (8, SKIPPED + 3) if options.small else (128, 60)
    for name in ["small"] if options.small else options.models:
        of = Kinds(models.small_gpt2 if options.small else models.REAL[name])
        for rows in options.batches:
            one = functools.partial(of.one_token, rows, prompt, calls)
            yield Cell(f"{name}, batch {rows}, one token after {prompt}", one)
        yield Cell(f"{name}, {COMPARED} greedy tokens", of.greedy)


def _models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=sorted(models.REAL), default=["gpt2", "llama"])


def _quantised_arguments(parser: argparse.ArgumentParser) -> None:
    _models(parser)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])


# --- caches ---

DTYPES: Mapping[str, torch.dtype | None] = {
    "float32": None, "int8": torch.int8, "float8": torch.float8_e4m3fn,
}  # fmt: skip
CALLS, SEQUENCES, LENGTH = 40, 4, 128
STOCK = ("gpt2", "llama", "gemma2", "qwen3")


def _decoders(model: nn.Module) -> dict[str, attngraph.Decoder]:
    return {
        n: attngraph.compile(model, cache=attngraph.CacheConfig(dtype=dtype)) for n, dtype in DTYPES.items()
    }


def over_kept(make: Callable[[], Any], kept: int) -> dict[str, Row]:
    """One more token after so many, and the bytes of a kept token, by cache."""
    model: Any = models.made(make)
    calls, states = _steps(_decoders(model), torch.randint(0, model.config.vocab_size, (1, kept)))
    found, speed = in_turns(calls, CALLS, SKIPPED), bandwidth()
    for name, row in found.items():
        size = states[name].bytes_per_token
        row |= {"bytes_per_token": size, "floor": size * kept / speed, "gbytes": speed / 1e9}
    return found


def drifts(kind: str) -> dict[str, Row]:
    """How far rounding moves the logits of a stock model."""
    ids = torch.randint(0, 1000, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    decoders = _decoders(models.made(lambda: models.stock(kind)))
    return {name: asdict(decoder.drift(ids)) for name, decoder in decoders.items()}


def caches_cells(options: Options) -> Iterator[Cell]:
    kept, layers = (32, 2) if options.small else (options.tokens, options.layers)
    makes: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: models.eagerly(lambda: models.gpt2(kept + CALLS + SKIPPED, layers)),
        "llama": lambda: models.llama(layers), "small": models.small_gpt2,
    }  # fmt: skip
    for name in ["small"] if options.small else options.models:
        yield Cell(f"{name}, one token over {kept} kept", functools.partial(over_kept, makes[name], kept))
    for kind in STOCK[:1] if options.small else STOCK:
        yield Cell(f"{kind}, logits", functools.partial(drifts, kind))


def _caches_arguments(parser: argparse.ArgumentParser) -> None:
    _models(parser)
    parser.add_argument("--tokens", type=int, default=8192, help="kept ones")
    parser.add_argument("--layers", type=int, default=12)


WEIGHTS = Suite("quantised", __doc__, quantised_cells, _quantised_arguments, base="float32").main
CACHES = Suite("narrow-caches", __doc__, caches_cells, _caches_arguments, base="float32").main
