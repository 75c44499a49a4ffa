"""Decoding multi-head latent attention on the CPU: absorbed, expanded, and transformers' own cache.

    python -m workshop.bench.latent [--lengths 1024 4096 16384] [--layers 2] [--json F]

DeepSeek-V3 at an eighth of its width and heads (16 heads, latent 512 + 64), random weights, float32, dense
feed-forward layers. For each length the caches are filled with random values, then one token is decoded by
each candidate in turn within one run:

    absorbed        the latent is kept, queries and results are projected (`absorb="auto"`)
    expanded        keys and values of every head are kept (`absorb="never"`)
    transformers    the latent is kept and projected up again at every token

Operations are those of matrix products as torch's own counter sees them, ours with `backend="reference"`,
which computes everything by plain products; beside them stand the formulas of `attngraph/ir/ops/cost.py`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import attngraph
from workshop.bench.plot import Bars

ROUNDS = 15


def model(layers: int) -> Any:
    """DeepSeek-V3 at 1/8 of its width, with its own head sizes."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=1024, hidden_size=896, intermediate_size=2304, num_hidden_layers=layers,
        first_k_dense_replace=layers, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=192,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        max_position_embeddings=1 << 16, attn_implementation="eager",
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).eval()


def filled(decoder: attngraph.Decoder, length: int) -> attngraph.KVCache:
    """A state of one row that holds `length` tokens of random values."""
    _, state = decoder.prefill(torch.zeros(1, 2, dtype=torch.int64))
    state.reset()
    state.reserve([length])
    news: dict[str, Tensor] = {}
    for store in state.plan.stores:
        shape = list(store.shape)
        shape[store.row_dim], shape[store.token_dim] = 1, length
        news[store.name] = torch.randn(shape, dtype=store.dtype)
    state.write(news, state.inputs([length]), [length])
    return state


def their_cache(theirs: Any, length: int) -> Any:
    from transformers import DynamicCache

    cache, config = DynamicCache(config=theirs.config), theirs.config
    for layer in range(config.num_hidden_layers):
        parts = (torch.randn(1, 1, length, n) for n in (config.kv_lora_rank, config.qk_rope_head_dim))
        cache.update(*parts, layer)
    return cache


def count(call: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def formulas(entry: Any, config: Any, linear: int, length: int) -> dict[str, int]:
    """Operations of one token after `length` cached ones, by the formulas: `linear` are those of all linear
    layers as the model has them, in which each token is projected up once."""
    layers, keys = config.num_hidden_layers, length + 1
    return {
        "absorbed": linear + layers * keys * entry.pair_absorbed,
        "expanded": linear + layers * keys * entry.pair_expanded,
        "transformers": linear + layers * (keys * entry.pair_expanded + length * entry.up),
    }


def measure(theirs: Any, decoders: dict[str, attngraph.Decoder], length: int) -> dict[str, Any]:
    token = torch.zeros(1, 1, dtype=torch.int64)
    from attngraph.hf import CACHE

    states = {name: filled(decoder, length) for name, decoder in decoders.items()}
    cache = their_cache(theirs, length)
    candidates: dict[str, Callable[[], object]] = {
        name: functools.partial(_token, decoders[name], token, state) for name, state in states.items()
    }

    def transformers() -> None:
        theirs(token, **{CACHE: cache}, use_cache=True)
        cache.crop(-1)

    candidates["transformers"] = transformers
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(ROUNDS + 2):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    per_token = {name: state.bytes_per_token for name, state in states.items()}
    config = theirs.config
    kept = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    return {
        "milliseconds": {name: statistics.median(spent) * 1000 for name, spent in times.items()},
        "bytes per token": {**per_token, "transformers": kept},
    }


def _token(decoder: attngraph.Decoder, token: Tensor, state: attngraph.KVCache) -> None:
    length = state.lengths[0]
    decoder.decode(token, state)
    state.crop(length)


def operations(theirs: Any, length: int) -> dict[str, dict[str, int]]:
    """Operations as counted, and by the formulas."""
    from attngraph.hf import CACHE

    token = torch.zeros(1, 1, dtype=torch.int64)
    found: dict[str, int] = {}
    entry: Any = None
    for name, absorb in (("absorbed", "always"), ("expanded", "never")):
        decoder = attngraph.compile(theirs, cache=True, backend="reference", absorb=absorb)
        state = filled(decoder, length)
        found[name] = count(functools.partial(decoder.decode, token, state))
        entry = entry or decoder.report.attention[0].latent
    cache = their_cache(theirs, length)
    found["transformers"] = count(lambda: theirs(token, **{CACHE: cache}, use_cache=True))
    weights = [m for m in theirs.modules() if isinstance(m, nn.Linear)]
    linear = sum(2 * m.in_features * m.out_features for m in weights)
    return {"counted": found, "formula": formulas(entry, theirs.config, linear, length)}


def bars(result: dict[str, Any]) -> Bars:
    """Times of one token, from what `--json` writes."""
    cells = {
        f"{length} kept": {name: float(spent) for name, spent in found["milliseconds"].items()}
        for length, found in result.items()
        if isinstance(found, dict)
    }
    title = f"one token of latent attention, torch {result['torch']}, {result['threads']} threads"
    return Bars(title, "milliseconds", cells, log=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with torch.no_grad():
        theirs = model(options.layers)
        print("... compiling", file=sys.stderr, flush=True)
        decoders = {
            name: attngraph.compile(theirs, cache=True, absorb=absorb)
            for name, absorb in (("absorbed", "auto"), ("expanded", "never"))
        }
        for length in options.lengths:
            print(f"... {length} tokens kept", file=sys.stderr, flush=True)
            found = {**measure(theirs, decoders, length), "operations": operations(theirs, length)}
            results[str(length)] = found
            _print(length, found)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _print(length: int, found: dict[str, Any]) -> None:
    times, counted = found["milliseconds"], found["operations"]["counted"]
    print(f"{length} tokens kept, one more:")
    for name, spent in times.items():
        formula = found["operations"]["formula"][name]
        print(
            f"  {name:14} {spent:9.2f} ms {times['transformers'] / spent:7.1f}x   "
            f"{found['bytes per token'][name]:8,} bytes a token   {counted[name] / 1e6:10,.1f} MFLOP "
            f"(formula {formula / 1e6:,.1f}, {counted[name] / formula - 1:+.1%})"
        )


if __name__ == "__main__":
    sys.exit(main())
