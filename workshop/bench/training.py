"""Training steps of two models at several sizes, compiled and not.

    python -m workshop training --json training.json

A step is a forward pass, a loss and a backward pass. One model is the Transformer as first published, with
padding masks; the other a decoder with rotary positions, grouped heads and SwiGLU. Both have 2 layers of
width 256. Losses and gradients are compared first. "always fused" is the compiled model with `min_scores=0`:
what our operations cost at sizes where nothing is gained.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import attngraph
from attngraph.meaning.check.comparison import compare
from attngraph.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.models.targets import ragged_padding, seeded
from workshop.harness import Cell, Options, Row, Suite, times

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


Made = tuple[nn.Module, dict[str, Callable[..., Any]], Callable[[int, int], Step]]


def made(name: str) -> Made:
    """A model, what is compiled of it, and what makes its steps."""
    with seeded():
        model, step_of = MODELS[name]()
    return (
        model,
        {"attngraph": attngraph.compile(model), "always fused": attngraph.compile(model, min_scores=0)},
        step_of,
    )


def measured(of: Callable[[], Made], batch: int, tokens: int, rounds: int) -> dict[str, Row]:
    model, ways, step_of = of()
    with seeded():
        step = step_of(batch, tokens)
        wanted = [t.clone() for t in step(model)]
        for way, compiled in ways.items():
            for found, tensor in zip(step(compiled), wanted, strict=True):  # type: ignore[arg-type]
                result = compare(found, tensor)
                if result.problem or result.error > 1e-4:
                    raise SystemExit(f"{batch} x {tokens} tokens, {way}: answers differ: {result}")
        everything = {"eager": model, **ways}
        return times({way: functools.partial(step, m) for way, m in everything.items()}, rounds)  # type: ignore[arg-type]


def cells(options: Options) -> Iterator[Cell]:
    for name in MODELS:
        of = functools.cache(functools.partial(made, name))
        for batch, tokens in SIZES[:1] if options.small else SIZES:
            measure = functools.partial(measured, of, batch, tokens, options.rounds)
            yield Cell(f"{name}, {batch} x {tokens} tokens", measure)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=30)


SUITE = Suite("training", __doc__, cells, _arguments, base="eager", gradients=True)
MAIN = SUITE.main
