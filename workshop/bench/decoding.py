"""Decoders on the CPU beside transformers' own caches and beside recomputing; random weights, float32.

    python -m workshop decode [--models gpt2 llama] [--batches 1 8] [--engine] [--json FILE]
    python -m workshop states --json states.json --plot states.png

decode: attention. The floor is the model's linear layers called bare on one token of each row, which every
way of decoding has to do. `--engine` compares 32 requests of mixed lengths with the same requests in fixed
batches. states: models whose memory does not grow, convolutions and state spaces: one token with few and with
many tokens seen, what a row takes; how long the decoder of a Qwen3-Next of 4 layers takes to derive; linear
attention over whole sequences. Of both: whole runs of `generate`; recomputing is one forward of the whole
sequence at its middle length.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.cache_folder import VARIABLE
from attngraph.models.linear_attention import LinearAttention, LinearAttentionConfig
from workshop.bench import models
from workshop.harness import Cell, Options, Row, Suite, in_turns, times

SKIPPED = 5
"""First calls of each candidate, which are not counted."""


class Subject:
    """A model and its decoder, made when they are first needed; what is measured of both suites."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    @functools.cached_property
    def model(self) -> Any:
        return self.make()

    @functools.cached_property
    def decoder(self) -> attngraph.Decoder:
        made: attngraph.Decoder = attngraph.compile(self.model, cache=True)
        return made

    def ids(self, rows: int, tokens: int) -> Tensor:
        return torch.randint(0, self.model.config.vocab_size, (rows, tokens))

    def by_length(self, length: int, calls: int) -> dict[str, Row]:
        """One token of one row that has seen so many."""
        _, state = self.decoder.prefill(self.ids(1, length))
        last = torch.zeros(1, 1, dtype=torch.int64)
        return in_turns({"attngraph": lambda: self.decoder.decode(last, state)}, calls, SKIPPED)

    def whole_runs(
        self, rows: int, prompt: int, new: int, caches: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Row]:
        """Tokens per second of generating for every row, the prompt included."""
        ids = self.ids(rows, prompt)
        given = {
            "attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False,
            "eos_token_id": None, "pad_token_id": 0,
        }  # fmt: skip
        calls: dict[str, Callable[[], Tensor]] = {"attngraph": lambda: self.decoder.generate(ids, new)}
        for name, more in caches.items():
            calls[name] = functools.partial(self.model.generate, ids, **given, **more)
        answers = {name: call() for name, call in calls.items()}
        found: dict[str, Row] = {
            n: {"per_second": rows * new / r["seconds"]} for n, r in in_turns(calls, 3).items()
        }
        for name, answer in answers.items():
            found[name]["equal"] = float((answers["attngraph"] == answer).float().mean())
        middle = self.ids(rows, prompt + new // 2)
        again = in_turns({"recomputing": lambda: self.model(middle, use_cache=False)}, 1)
        return {**found, "recomputing (estimate)": {"per_second": rows / again["recomputing"]["seconds"]}}


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


def one_token(of: Subject, rows: int, prompt: int, calls: int) -> dict[str, Row]:
    """One token for every row after a prompt, candidates in turn."""
    from transformers import StaticCache

    from attngraph.hf import CACHE

    model, ids = of.model, of.ids(rows, prompt)
    last, (_, state) = ids[:, -1:], of.decoder.prefill(ids)
    dynamic = model(ids, use_cache=True)[CACHE]
    static = StaticCache(config=model.config, max_cache_len=prompt + calls + 1)
    model(ids, **{CACHE: static}, use_cache=True)
    return in_turns({
        "floor": floor(model, rows), "attngraph": lambda: of.decoder.decode(last, state),
        "transformers": lambda: model(last, **{CACHE: dynamic}, use_cache=True),
        "transformers, static": lambda: model(last, **{CACHE: static}, use_cache=True),
    }, calls, SKIPPED)  # fmt: skip


def bytes_of_tokens(of: Subject, length: int) -> dict[str, Row]:
    """As reported, and as allocated for each token of room."""
    _, state = of.decoder.prefill(of.ids(1, length))
    room = sum(len(group.users) * group.page for group in state.groups.values())
    return {
        "reported": {"bytes_per_token": state.bytes_per_token},
        "allocated": {"bytes_per_token": state.nbytes / room},
    }


def engine(of: Subject, requests: int, places: int = 8) -> dict[str, Row]:
    """New tokens per second of mixed requests: batched in flight, and in fixed batches in arrival order."""
    draw, decoder, most = random.Random(0), of.decoder, of.model.config.vocab_size
    work = [
        ([draw.randrange(most) for _ in range(draw.randint(16, 256))], draw.randint(16, 128))
        for _ in range(requests)
    ]
    total = sum(count for _, count in work)
    decoder.generate([torch.tensor(prompt) for prompt, _ in work[:2]], 2)  # derived before timing starts
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
    return {"in flight": {"per_second": total / in_flight}, "fixed batches": {"per_second": total / fixed}}


_STATIC = {"cache_implementation": "static", "disable_compile": True}


def decode_cells(options: Options) -> Iterator[Cell]:
    small: bool = options.small
    prompt, new, calls, lengths = (8, 8, 8, (16, 32)) if small else (128, 128, 60, (64, 256, 512, 960))
    for name in ["small"] if small else options.models:
        make = models.small_gpt2 if small else models.REAL[name]
        of = Subject(functools.partial(models.eagerly, make))
        for rows in options.batches:
            yield Cell(
                f"{name}, batch {rows}, one token", functools.partial(one_token, of, rows, prompt, calls)
            )
            caches: dict[str, dict[str, Any]] = {"transformers": {}, "transformers, static": _STATIC}
            runs = functools.partial(of.whole_runs, rows, prompt, new, caches)
            yield Cell(f"{name}, batch {rows}, {prompt} + {new} tokens", runs)
        for length in lengths:
            yield Cell(
                f"{name}, {length} kept, one token",
                functools.partial(of.by_length, length, 8 if small else 25),
            )
        yield Cell(f"{name}, a kept token", functools.partial(bytes_of_tokens, of, lengths[-2]))
        if options.engine:
            count = 4 if small else 32
            yield Cell(f"{name}, {count} requests", functools.partial(engine, of, count))


def _decode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=sorted(models.REAL), default=["gpt2", "llama"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument(
        "--engine", action="store_true", help="mixed requests, in flight and in fixed batches"
    )


# --- states ---


def bytes_of_rows(of: Subject, seen: Sequence[int]) -> dict[str, Row]:
    """What one row keeps, by the tokens that it has seen, as allocated; what it needs whatever its length
    (what is carried, and windows of tokens); what each token adds."""
    found = {f"allocated for {n} tokens": {"bytes": of.decoder.prefill(of.ids(1, n))[1].nbytes} for n in seen}
    cache = of.decoder.report.cache
    assert cache is not None
    windows = sum(size * (window - 1) for _, size, window, _ in cache.stores if window is not None)
    each = sum(size // tokens for _, size, window, tokens in cache.stores if window is None)
    row = sum(size for _, size in cache.carried) + windows
    return {**found, "a row": {"bytes": row}, "each token": {"bytes": each}}


def derivation() -> dict[str, Row]:
    """Seconds until the decoder of a Qwen3-Next of 4 layers has its first logits, nothing taken from disk."""
    decoder = attngraph.compile(models.made(models.qwen3_next), cache=True)
    with mock.patch.dict(os.environ, {VARIABLE: "off"}):
        return in_turns({"attngraph": lambda: decoder.prefill(torch.randint(3, 100, (2, 7)))}, 1)


def linear_attention(width: int, length: int) -> dict[str, Row]:
    """Linear attention over whole sequences: as it is written, and compiled."""
    model = models.made(lambda: LinearAttention(LinearAttentionConfig(width, 4, width // 4, width // 4)))
    x = torch.randn(1, length, width)
    ways = {"eager": model, "attngraph": attngraph.compile(model)}
    return times({name: functools.partial(way, x) for name, way in ways.items()}, rounds=5)


def states_cells(options: Options) -> Iterator[Cell]:
    small: bool = options.small
    width, sizes = (64, (64, 2, 100)) if small else (768, (768, 24, 32000))
    seen, calls, prompt, new = ((16, 64), 10, 8, 6) if small else ((128, 1024, 4096), 45, 128, 128)
    makes: dict[str, Callable[..., Any]] = {"Mamba-2": models.mamba2, "LFM2": models.lfm2}
    for name in options.models:
        of = Subject(functools.partial(models.made, functools.partial(makes[name], *sizes)))
        for length in seen:
            yield Cell(f"{name}, {length} seen, one token", functools.partial(of.by_length, length, calls))
        yield Cell(f"{name}, a row", functools.partial(bytes_of_rows, of, seen))
        for rows in (1, 2) if small else (1, 8):
            runs = functools.partial(of.whole_runs, rows, prompt, new, {"transformers": {}})
            yield Cell(f"{name}, batch {rows}, {prompt} + {new} tokens", runs)
    yield Cell("Qwen3-Next of 4 layers, deriving a decoder", derivation)
    for length in (64, 128) if small else (2048, 4096, 8192):
        yield Cell(f"linear attention, {length} tokens", functools.partial(linear_attention, width, length))


def _states_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", choices=("Mamba-2", "LFM2"), default=["Mamba-2", "LFM2"])


DECODE = Suite("decode", __doc__, decode_cells, _decode_arguments, base="floor").main
STATES = Suite("states", __doc__, states_cells, _states_arguments, base="eager").main
