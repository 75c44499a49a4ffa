"""Training steps of two models at several sizes, compiled and not.

    python -m workshop.bench.training --json training.json

A step is a forward pass, a loss and a backward pass. One model is the Transformer as first published, with
padding masks; the other a decoder with rotary positions, grouped heads and SwiGLU. Both have 2 layers of
width 256. Losses and gradients are compared first. "always fused" is the compiled model with `min_scores=0`:
what our operations cost at sizes where nothing is gained.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import attngraph
from attngraph.meaning.check.comparison import compare
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.models.targets import ragged_padding, seeded
from attngraph.runtime.measure import measure

SIZES = ((1, 16), (8, 32), (4, 128), (8, 128), (2, 512), (2, 1024))
Step = Callable[[nn.Module], list[Tensor]]
"""Runs a step of a module with the model's arguments; returns the loss and all gradients."""


def encoder_decoder() -> tuple[nn.Module, Callable[[int, int], Step]]:
    model = EncoderDecoder(EncoderDecoderConfig(layers=2, width=256, heads=8, hidden=1024, max_tokens=1024))

    def step_of(batch: int, tokens: int) -> Step:
        source, target = torch.randint(256, (2, batch, tokens)).unbind()
        padding = ragged_padding(batch, tokens)
        return lambda m: _step(model, lambda: m(source, target, padding, padding, target)[1])

    return model, step_of


def modern_decoder() -> tuple[nn.Module, Callable[[int, int], Step]]:
    model = ModernDecoder(
        ModernDecoderConfig(layers=2, width=256, heads=8, kv_heads=4, head_width=32, hidden=688)
    )

    def step_of(batch: int, tokens: int) -> Step:
        ids = torch.randint(256, (batch, tokens))
        loss = functional.cross_entropy
        return lambda m: _step(model, lambda: loss(m(ids).flatten(0, 1), ids.flatten()))

    return model, step_of


MODELS = {"encoder-decoder": encoder_decoder, "modern decoder": modern_decoder}


def _step(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    value = loss()
    value.backward()  # type: ignore[no-untyped-call]
    return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def run(name: str, sizes: Sequence[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """The rows of one model."""
    rows = []
    with seeded():
        model, step_of = MODELS[name]()
        ways = {"attngraph": attngraph.compile(model), "always fused": attngraph.compile(model, min_scores=0)}
        for batch, tokens in sizes:
            step = step_of(batch, tokens)
            wanted = [t.clone() for t in step(model)]
            for way, compiled in ways.items():
                for found, tensor in zip(step(compiled), wanted, strict=True):
                    result = compare(found, tensor)
                    if result.problem or result.error > 1e-4:
                        raise SystemExit(
                            f"{name}, {batch} x {tokens} tokens, {way}: answers differ: {result}"
                        )
            calls: dict[str, Callable[[], object]] = {"eager": lambda step=step: step(model)}  # type: ignore[misc]
            calls |= {w: lambda step=step, m=m: step(m) for w, m in ways.items()}  # type: ignore[misc]
            measured = measure(calls, rounds=rounds, seconds=60.0)
            row = {"model": name, "batch": batch, "tokens": tokens}
            rows.append(row | {way: asdict(m) for way, m in measured.items()})
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """One row of the table: eager's time, and how many times as fast the others are."""
    eager = row["eager"]["seconds"]
    speeds = [f"{eager / row[way]['seconds']:12.2f}x" for way in ("attngraph", "always fused")]
    return f"{row['model']:16} {row['batch']:5} {row['tokens']:6} {eager * 1e3:9.1f}" + "".join(speeds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="the smallest size alone, to see that it works")
    options = parser.parse_args(argv)
    print(f"{'model':16} {'batch':>5} {'tokens':>6} {'eager, ms':>9}{'attngraph':>13}{'always fused':>13}")
    rows = [r for name in MODELS for r in run(name, SIZES[:1] if options.small else SIZES, options.rounds)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
