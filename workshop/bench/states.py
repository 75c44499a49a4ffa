"""Models whose memory does not grow: decoders of convolutions and state spaces, linear attention in chunks.

    python -m workshop bench --suite states --json states.json --plot states.png      (--small: tiny)

Random weights in float32, on the CPU. For Mamba-2 and LFM2 of about 100M parameters: one token with few and
with many tokens seen, what a row takes, and whole runs of `generate` beside transformers' own cached path
and (estimated from one call in the middle) beside recomputation. Qwen3-Next of 4 layers: how long its
decoder takes to derive. Linear attention over whole sequences, compiled and eager: time and peak memory by
length.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.cache_folder import VARIABLE
from attngraph.models.linear_attention import LinearAttention, LinearAttentionConfig
from attngraph.runtime.measure import measure
from workshop.bench.plot import Bars

SKIPPED = 5
"""First calls of each candidate, which are not counted."""


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    width: int
    layers: int
    vocabulary: int
    seen: tuple[int, ...]
    calls: int
    prompt: int
    new: int
    batches: tuple[int, ...]
    lengths: tuple[int, ...]


FULL = Scale(768, 24, 32000, (128, 1024, 4096), 45, 128, 128, (1, 8), (2048, 4096, 8192))
SMALL = Scale(64, 2, 100, (16, 64), 10, 8, 6, (1, 2), (64, 128))
_NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


def _mamba2(scale: Scale) -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    head = min(64, scale.width // 2)
    return Mamba2ForCausalLM(Mamba2Config(
        vocab_size=scale.vocabulary, hidden_size=scale.width, num_hidden_layers=scale.layers,
        num_heads=2 * scale.width // head, head_dim=head, state_size=head, n_groups=1, **_NO_TOKENS,
    ))  # fmt: skip


def _lfm2(scale: Scale) -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["full_attention" if layer % 3 == 1 else "conv" for layer in range(max(scale.layers // 2, 3))]
    config = Lfm2Config(
        vocab_size=scale.vocabulary, hidden_size=scale.width, num_hidden_layers=len(kinds), layer_types=kinds,
        intermediate_size=4 * scale.width, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=1 << 15, **_NO_TOKENS,
    )  # fmt: skip
    return Lfm2ForCausalLM(config)


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = Qwen3NextConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=4, layer_types=kinds, intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, **_NO_TOKENS,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


MODELS: dict[str, Callable[[Scale], Any]] = {"Mamba-2": _mamba2, "LFM2": _lfm2}


def one_token(decoder: attngraph.Decoder, scale: Scale) -> dict[str, float]:
    """Median milliseconds of one token of one row, by the tokens that the row has seen; in turn."""
    last = torch.zeros(1, 1, dtype=torch.int64)
    states = {n: decoder.prefill(torch.randint(0, scale.vocabulary, (1, n)))[1] for n in scale.seen}
    spent: dict[int, list[float]] = {n: [] for n in states}
    for _ in range(scale.calls):
        for seen, state in states.items():
            start = time.perf_counter()
            decoder.decode(last, state)
            spent[seen].append(time.perf_counter() - start)
    return {str(n): 1000 * statistics.median(times[SKIPPED:]) for n, times in spent.items()}


def bytes_of_rows(decoder: attngraph.Decoder, scale: Scale) -> dict[str, int]:
    """What one row keeps, by the tokens that it has seen, as allocated; what it needs whatever its length
    (what is carried, and windows of tokens); what each token adds."""
    found: dict[str, int] = {}
    for seen in scale.seen:
        _, state = decoder.prefill(torch.randint(0, scale.vocabulary, (1, seen)))
        found[f"allocated for {seen} tokens"] = state.nbytes
    cache = decoder.report.cache
    assert cache is not None
    windows = sum(size * (window - 1) for _, size, window in cache.stores if window is not None)
    found["a row"] = sum(size for _, size in cache.carried) + windows
    return {**found, "each token": sum(size for _, size, window in cache.stores if window is None)}


def whole_runs(model: Any, decoder: attngraph.Decoder, rows: int, scale: Scale) -> dict[str, float]:
    """Tokens per second of generating for every row, the prompt included."""
    ids = torch.randint(0, scale.vocabulary, (rows, scale.prompt))
    given = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": scale.new, "do_sample": False,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    candidates: dict[str, Callable[[], Tensor]] = {
        "attngraph": lambda: decoder.generate(ids, scale.new),
        "transformers": lambda: model.generate(ids, **given),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    answers = {name: call() for name, call in candidates.items()}
    for _ in range(3):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    found = {name: rows * scale.new / statistics.median(spent) for name, spent in times.items()}
    middle = torch.randint(0, scale.vocabulary, (rows, scale.prompt + scale.new // 2))
    start = time.perf_counter()
    model(middle, use_cache=False)
    found["recomputing (estimate)"] = rows / (time.perf_counter() - start)
    found["share of equal tokens"] = float((answers["attngraph"] == answers["transformers"]).float().mean())
    return found


def derivation(ids: Tensor) -> float:
    """Seconds until the decoder of a Qwen3-Next of 4 layers has its first logits, nothing taken from disk."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "off"
    try:
        torch.manual_seed(0)
        decoder = attngraph.compile(_qwen3_next().eval(), cache=True)
        start = time.perf_counter()
        decoder.prefill(ids)
        return time.perf_counter() - start
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def linear_attention(scale: Scale) -> dict[str, dict[str, dict[str, float]]]:
    """Linear attention over whole sequences: as it is written, and compiled."""
    torch.manual_seed(0)
    model: nn.Module = LinearAttention(
        LinearAttentionConfig(scale.width, 4, scale.width // 4, scale.width // 4)
    ).eval()
    compiled = attngraph.compile(model)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for length in scale.lengths:
        x = torch.randn(1, length, scale.width)
        given = {"eager": functools.partial(model, x), "attngraph": functools.partial(compiled, x)}
        measured = measure(given, rounds=5)
        found[str(length)] = {name: asdict(figures) for name, figures in measured.items()}
    return found


def bars(result: dict[str, Any]) -> Bars:
    """Times of one token, from what `--json` writes."""
    cells = {
        f"{name}, {seen} seen": {"attngraph": spent}
        for name, found in result["models"].items()
        for seen, spent in found["one token"].items()
    }
    title = f"one token, torch {result['torch']}, {result['threads']} threads"
    return Bars(title, "milliseconds", cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--small", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    scale = SMALL if options.small else FULL
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "models": {}}
    with torch.no_grad():
        for name in options.models:
            found["models"][name] = _measured(name, scale)
        _say("Qwen3-Next: deriving a decoder")
        found["Qwen3-Next, 4 layers, seconds to derive"] = derivation(torch.randint(3, 100, (2, 7)))
        print(f"Qwen3-Next of 4 layers: {found['Qwen3-Next, 4 layers, seconds to derive']:.1f} s to derive")
        _say("linear attention")
        found["linear attention"] = linear_attention(scale)
    for length, each in found["linear attention"].items():
        shown = {f"{what} {n}": m[key] * by for what, m in each.items()
                 for n, key, by in (("ms", "seconds", 1e3), ("MB", "peak_bytes", 1e-6))}  # fmt: skip
        print(f"linear attention, {length} tokens: {_shown(shown)}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _measured(name: str, scale: Scale) -> dict[str, Any]:
    _say(f"{name}: deriving a decoder")
    torch.manual_seed(0)
    model = MODELS[name](scale).eval()
    decoder = attngraph.compile(model, cache=True)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    _say(f"{name}: one token")
    found: dict[str, Any] = {"one token": one_token(decoder, scale), "bytes": bytes_of_rows(decoder, scale)}
    print(f"{name}, {millions:.1f}M, milliseconds of one token by tokens seen: {_shown(found['one token'])}")
    print(f"{name}, bytes: {_shown(found['bytes'])}")
    for rows in scale.batches:
        _say(f"{name}, batch {rows}: whole runs")
        found[f"batch {rows}"] = whole_runs(model, decoder, rows, scale)
        print(f"{name}, batch {rows}, {scale.prompt} + {scale.new} tokens, tokens per second: "
              f"{_shown(found[f'batch {rows}'])}")  # fmt: skip
    return found


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items())


def _say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
