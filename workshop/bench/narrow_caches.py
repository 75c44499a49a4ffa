"""Decoding over a long cache of 8 bits on the CPU, beside one of float32.

    python -m workshop.bench.narrow_caches [--models gpt2 llama] [--tokens 8192] [--layers 12] [--json F]

For GPT-2 (124M) and a Llama of 100M parameters: what a kept token takes, and the time of one new token over
many kept ones, all caches in turns within one run. For four stock models of 4 layers: how far rounding in the
cache moves the logits. Weights are random; those of the four are wide enough that logits differ by about one.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attngraph
from workshop.bench.decoding import llama
from workshop.bench.quantised import SKIPPED, bandwidth, median_times, small

DTYPES: Mapping[str, torch.dtype | None] = {
    "float32": None, "int8": torch.int8, "float8": torch.float8_e4m3fn,
}  # fmt: skip
KEPT, TOKENS, SEQUENCES, LENGTH = 8192, 40, 4, 128
STOCK = ("gpt2", "llama", "gemma2", "qwen3")


def gpt2(tokens: int, layers: int) -> nn.Module:
    """GPT-2 with as many positions as are needed (124M parameters with 12 layers)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    made: nn.Module = GPT2LMHeadModel(
        GPT2Config(attn_implementation="eager", n_positions=tokens, n_layer=layers)
    ).eval()
    return made


MODELS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "gpt2": gpt2, "llama": lambda tokens, layers: llama(layers), "small": lambda *_: small(),
}  # fmt: skip


def stock(kind: str) -> nn.Module:
    """A causal language model of transformers: 4 layers of width 256, 4 heads, 2 of keys but in GPT-2."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    if kind != "gpt2":
        sizes |= {"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model(kind, vocab_size=1000, initializer_range=0.06, **sizes)
    config._attn_implementation = "eager"
    made: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return made


def decoders_of(model: nn.Module) -> dict[str, attngraph.Decoder]:
    return {
        name: attngraph.compile(model, cache=attngraph.CacheConfig(dtype=dtype))
        for name, dtype in DTYPES.items()
    }


def prepare(name: str, kept: int, layers: int) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """What computes one more token after `kept` ones, and the bytes of a kept token, by cache."""
    torch.manual_seed(0)
    model: Any = MODELS[name](kept + TOKENS + SKIPPED, layers)
    ids = torch.randint(0, model.config.vocab_size, (1, kept))
    ways: dict[str, Callable[[], Any]] = {}
    sizes: dict[str, int] = {}
    for cache, decoder in decoders_of(model).items():
        _, state = decoder.prefill(ids)
        sizes[cache] = state.bytes_per_token
        ways[cache] = functools.partial(decoder.decode, ids[:, -1:], state)
    return ways, sizes


def measure(
    name: str, kept: int, ways: Mapping[str, Callable[[], Any]], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Time them, and print what was found."""
    times, speed = median_times(ways, TOKENS), bandwidth()
    print(f"{name}, one token over {kept:,} kept ones, at {speed / 1e9:.1f} GB/s:")
    for cache, spent in times.items():
        floor = sizes[cache] * kept / speed * 1000
        bytes_ = f"{sizes[cache]:7,} bytes a token, read in {floor:6.2f} ms at least"
        faster = f"{times['float32'] / spent:.2f} times as fast"
        print(f"  {cache:8} {bytes_}   {spent:7.2f} ms   {faster}", flush=True)
    return {"bytes": dict(sizes), "one token": times, "kept": kept, "bytes per second": speed}


def drifts(kind: str) -> dict[str, Any]:
    """How far rounding moves the logits of a stock model, printed as well."""
    torch.manual_seed(0)
    model = stock(kind)
    ids = torch.randint(0, 1000, (SEQUENCES, LENGTH))
    found: dict[str, Any] = {}
    for cache, decoder in decoders_of(model).items():
        drift = decoder.drift(ids)
        print(f"{kind}, {cache}: {drift}", flush=True)
        found[cache] = {
            "mean": drift.mean,
            "largest": drift.largest,
            "same": drift.same,
            "tokens": drift.tokens,
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["gpt2", "llama"])
    parser.add_argument("--tokens", type=int, default=KEPT, help="kept ones")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a tiny model, few tokens and one stock model")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    names, kept, kinds = (
        (["small"], 32, STOCK[:1]) if options.small else (options.models, options.tokens, STOCK)
    )
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with torch.no_grad():
        for name in names:
            results[name] = measure(name, kept, *prepare(name, kept, options.layers))
        results["drift"] = {kind: drifts(kind) for kind in kinds}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
