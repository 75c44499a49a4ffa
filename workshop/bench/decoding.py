"""Decoding on the CPU: attngraph's decoder beside transformers' own caches and beside recomputing.

    python -m workshop.bench.decoding [--models gpt2 llama] [--batches 1 8] [--engine] [--json F]

Random weights, float32. For each model and batch, in turns within one run: the floor (the model's linear
layers called bare on one token of each row, which every way of decoding has to do), one token of
attngraph's decoder, one of transformers' with its dynamic and its static cache; then whole runs of
`generate`. Recomputing is one forward of the whole sequence at its middle length. `--engine` compares 32
requests of mixed lengths with the same requests in fixed batches.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attngraph
from workshop.bench.plot import Bars

PROMPT, NEW, SKIPPED = 128, 128, 5


def gpt2() -> nn.Module:
    """GPT-2 at real size: 124M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _ready(GPT2LMHeadModel(GPT2Config(attn_implementation="eager")))


def llama(layers: int = 12) -> nn.Module:
    """A Llama of 100M parameters: 12 layers of width 768, 12 heads over 4 key heads, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    return _ready(LlamaForCausalLM(config))


def _ready(model: Any) -> nn.Module:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    found: nn.Module = model.eval()
    return found


MODELS: Mapping[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def floor(model: nn.Module, rows: int) -> Callable[[], None]:
    """The model's linear layers alone, on one token of each row."""
    weights: list[tuple[Tensor, Tensor | None]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights.append((module.weight.T, module.bias))
        elif type(module).__name__ == "Conv1D":
            weights.append((module.weight, module.bias))  # type: ignore[arg-type]
    inputs = [torch.ones(rows, w.shape[0]) for w, _ in weights]

    def run() -> None:
        for (weight, bias), x in zip(weights, inputs, strict=True):
            torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    return run


def one_token(model: Any, decoder: attngraph.Decoder, ids: Tensor, count: int) -> dict[str, float]:
    """Median milliseconds for one token of every row, with candidates timed in turn."""
    from transformers import StaticCache

    from attngraph.hf import CACHE

    rows = ids.shape[0]
    last = ids[:, -1:]
    _, state = decoder.prefill(ids)
    dynamic = model(ids, use_cache=True)[CACHE]
    static = StaticCache(config=model.config, max_cache_len=PROMPT + count + 1)
    model(ids, **{CACHE: static}, use_cache=True)
    candidates: dict[str, Callable[[], object]] = {
        "floor": floor(model, rows),
        "attngraph": lambda: decoder.decode(last, state),
        "transformers": lambda: model(last, **{CACHE: dynamic}, use_cache=True),
        "transformers, static": lambda: model(last, **{CACHE: static}, use_cache=True),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(count):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent[SKIPPED:]) * 1000 for name, spent in times.items()}


def by_length(decoder: attngraph.Decoder, rows: int, lengths: Sequence[int]) -> dict[int, float]:
    """Median milliseconds for one token, for each number of tokens already cached."""
    found: dict[int, float] = {}
    for length in lengths:
        _, state = decoder.prefill(torch.randint(0, 30000, (rows, length)))
        last = torch.zeros(rows, 1, dtype=torch.int64)
        spent = []
        for _ in range(25):
            start = time.perf_counter()
            decoder.decode(last, state)
            spent.append(time.perf_counter() - start)
        found[length] = statistics.median(spent[SKIPPED:]) * 1000
    return found


def whole_runs(model: Any, decoder: attngraph.Decoder, ids: Tensor) -> dict[str, float]:
    """Tokens per second of generating NEW tokens for every row, the prompt included."""
    candidates: dict[str, Callable[[], Tensor]] = {
        "attngraph": lambda: decoder.generate(ids, NEW),
        "transformers": lambda: model.generate(ids, max_new_tokens=NEW, do_sample=False),
        "transformers, static": lambda: model.generate(
            ids, max_new_tokens=NEW, do_sample=False, cache_implementation="static", disable_compile=True
        ),
    }
    found: dict[str, float] = {}
    answers: dict[str, Tensor] = {}
    for name, call in candidates.items():
        call() if name == "attngraph" else None
        spent = []
        for _ in range(2):
            start = time.perf_counter()
            answers[name] = call()
            spent.append(time.perf_counter() - start)
        found[name] = ids.shape[0] * NEW / min(spent)
    middle = torch.randint(0, 30000, (ids.shape[0], PROMPT + NEW // 2))
    start = time.perf_counter()
    model(middle, use_cache=False)
    found["recomputing (estimate)"] = ids.shape[0] / (time.perf_counter() - start)
    equal = (answers["attngraph"] == answers["transformers"]).float().mean()
    found["share of equal tokens"] = float(equal)
    return found


def engine(decoder: attngraph.Decoder, requests: int = 32, places: int = 8) -> dict[str, float]:
    """New tokens per second of mixed requests: batched in flight, and in fixed batches in arrival order."""
    draw = random.Random(0)
    work = [
        ([draw.randrange(30000) for _ in range(draw.randint(16, 256))], draw.randint(16, 128))
        for _ in range(requests)
    ]
    total = sum(count for _, count in work)
    decoder.generate(
        [torch.tensor(prompt) for prompt, _ in work[:2]], 2
    )  # the decoder is derived before timing starts
    start = time.perf_counter()
    running = attngraph.Engine(decoder, max_batch=places)
    handles = [running.submit(prompt, count) for prompt, count in work]
    running.run()
    in_flight = time.perf_counter() - start
    assert all(len(h.tokens) == count for h, (_, count) in zip(handles, work, strict=True))
    start = time.perf_counter()
    for first in range(0, requests, places):
        group = work[first : first + places]
        decoder.generate([torch.tensor(p) for p, _ in group], max(count for _, count in group))
    fixed = time.perf_counter() - start
    return {"in flight": total / in_flight, "fixed batches": total / fixed, "ratio": fixed / in_flight}


def bars(result: dict[str, Any]) -> Bars:
    """Times of one token, from what `--json` writes."""
    cells = {
        f"{name}, {batch}": {what: float(spent) for what, spent in figures["one token"].items()}
        for name, found in result.items()
        if isinstance(found, dict)
        for batch, figures in found.items()
        if batch.startswith("batch")
    }
    title = f"one token after {PROMPT}, torch {result['torch']}, {result['threads']} threads"
    return Bars(title, "milliseconds", cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["gpt2", "llama"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument(
        "--engine", action="store_true", help="mixed requests, in flight and in fixed batches"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with torch.no_grad():
        for name in options.models:
            torch.manual_seed(0)
            model = MODELS[name]()
            decoder = attngraph.compile(model, cache=True)
            results[name] = _measure(name, model, decoder, options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _measure(name: str, model: nn.Module, decoder: attngraph.Decoder, options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows in options.batches:
        ids = torch.randint(0, 30000, (rows, PROMPT))
        _say(f"{name}, batch {rows}: one token")
        times = one_token(model, decoder, ids, 60)
        print(f"{name}, batch {rows}, milliseconds of one token after {PROMPT}:")
        for what, spent in times.items():
            print(f"  {what:24} {spent:8.1f}   {spent / times['floor']:.2f} of the floor")
        _say(f"{name}, batch {rows}: whole runs")
        speeds = whole_runs(model, decoder, ids)
        print(f"{name}, batch {rows}, {PROMPT} + {NEW} tokens, tokens per second:")
        for what, speed in speeds.items():
            print(f"  {what:24} {speed:8.2f}")
        found[f"batch {rows}"] = {"one token": times, "generate": speeds}
    lengths = by_length(decoder, 1, (64, 256, 512, 960))
    print(f"{name}, batch 1, milliseconds of one token by tokens kept: {_shown(lengths)}")
    _, state = decoder.prefill(torch.randint(0, 30000, (1, 512)))
    held = {"reported per token": state.bytes_per_token, "allocated per token of room": _allocated(state)}
    print(f"{name}, bytes: {_shown(held)}")
    found |= {"by length": lengths, "bytes": held}
    if options.engine:
        _say(f"{name}: engine")
        found["engine"] = engine(decoder)
        print(f"{name}, 32 requests, new tokens per second: {_shown(found['engine'])}")
    return found


def _allocated(state: attngraph.KVCache) -> float:
    room = sum(len(group.users) * group.page for group in state.groups.values())
    return state.nbytes / room


def _shown(figures: Mapping[Any, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items())


def _say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
