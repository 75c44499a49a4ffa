"""One attention on the CPU, by five ways of computing it, side by side.

    python -m workshop attention --json results.json
    python -m workshop attention --tokens 2048 --programs causal alibi

Each program is a module written the plain way, given to attngraph.compile as a user would (`attngraph`),
run as it is (`eager`) and through torch.compile (`inductor`); beside it what one would write by hand:
scaled_dot_product_attention with the same mask or bias (`sdpa`, where it can express the program), and a
compiled flex_attention with its block mask (`flex`). Times are medians of rounds in which all take turns;
memory is the rise of the process's peak. Batch 1, 8 heads of width 64. Answers are compared first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngraph
from attngraph.meaning.check.comparison import compare
from workshop.harness import Cell, Options, Row, Suite, times

HEADS, WIDTH, WINDOW, GLOBAL, CAP, DOCUMENTS = 8, 64, 256, 64, 50.0, 5
TOKENS = (512, 1024, 2048, 4096, 8192)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMIT = 8 << 30
"""Bytes above which a candidate is left out."""
Call = Callable[[], Tensor]


class Plain(nn.Module):
    """Attention as textbooks write it; subclasses define which pairs are kept and how scores change."""

    kept: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))
        self.slopes: Tensor

    def scores(self, scores: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return scores

    def mask(self, i: Tensor, j: Tensor, documents: Tensor) -> Tensor | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        scores = self.scores(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), i, j)
        mask = self.mask(i, j, documents)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, -1) @ v


class Causal(Plain):
    def mask(self, i: Tensor, j: Tensor, documents: Tensor) -> Tensor:
        return j <= i


class Window(Plain):
    def mask(self, i: Tensor, j: Tensor, documents: Tensor) -> Tensor:
        return (j <= i) & (i - j < WINDOW)


class WindowGlobal(Plain):
    def mask(self, i: Tensor, j: Tensor, documents: Tensor) -> Tensor:
        return (j <= i) & ((i - j < WINDOW) | (j < GLOBAL))


class Alibi(Causal):
    def scores(self, scores: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return scores + self.slopes.to(scores.dtype)[:, None, None] * (j - i)


class Softcap(Causal):
    def scores(self, scores: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return CAP * torch.tanh(scores / CAP)


class Documents(Plain):
    def mask(self, i: Tensor, j: Tensor, documents: Tensor) -> Tensor:
        return (j <= i) & (documents[:, None, :, None] == documents[:, None, None, :])


@dataclasses.dataclass(frozen=True)
class Program:
    """`sdpa`: whether scaled_dot_product_attention can express it. `copies`: how many matrices of scores the
    plain module holds at once."""

    module: type[Plain]
    key_heads: int = HEADS
    sdpa: bool = True
    copies: int = 3


PROGRAMS = {
    "plain": Program(Plain),
    "causal": Program(Causal),
    "window": Program(Window),
    "window-global": Program(WindowGlobal),
    "alibi": Program(Alibi, copies=4),
    "softcap": Program(Softcap, sdpa=False),
    "documents": Program(Documents),
    "grouped": Program(Causal, key_heads=HEADS // 4),
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    documents: Tensor

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.documents


def make_inputs(program: Program, tokens: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, WIDTH, generator=generator).to(dtype)
        for heads in (HEADS, program.key_heads, program.key_heads)
    )
    return Inputs(q, k, v, (torch.arange(tokens) * DOCUMENTS // tokens).view(1, tokens))


def by_sdpa(program: Program, model: Plain, given: Inputs) -> Call:
    """Written by hand: with the kernel's flags where they suffice, else with a precomputed mask or bias."""
    tokens, kind = given.q.shape[2], program.module
    call: Any = F.scaled_dot_product_attention
    grouped = program.key_heads < HEADS
    if kind in (Plain, Causal):
        return lambda: call(given.q, given.k, given.v, is_causal=kind is Causal, enable_gqa=grouped)
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    mask = model.mask(i, j, given.documents)
    assert mask is not None
    if kind is Alibi:
        bias = model.scores(torch.zeros(1, HEADS, tokens, tokens, dtype=given.q.dtype), i, j)
        mask = bias.masked_fill_(~mask, float("-inf"))
    return lambda: call(given.q, given.k, given.v, attn_mask=mask)


def by_flex(program: Program, model: Plain, given: Inputs) -> Call:
    tokens, kind = given.q.shape[2], program.module
    slopes, documents = model.slopes, given.documents[0]
    masks: dict[type[Plain], Any] = {
        Window: lambda b, h, i, j: (j <= i) & (i - j < WINDOW),
        WindowGlobal: lambda b, h, i, j: (j <= i) & ((i - j < WINDOW) | (j < GLOBAL)),
        Documents: lambda b, h, i, j: (j <= i) & (documents[i] == documents[j]),
    }
    changes: dict[type[Plain], Any] = {
        Alibi: lambda score, b, h, i, j: score + slopes[h] * (j - i),
        Softcap: lambda score, b, h, i, j: CAP * torch.tanh(score / CAP),
    }
    blocks = None
    if kind is not Plain:
        mask = masks.get(kind, lambda b, h, i, j: j <= i)
        blocks = create_block_mask(mask, None, None, tokens, tokens, device="cpu")
    call: Any = torch.compile(flex_attention, dynamic=False)
    grouped = program.key_heads < HEADS
    change = changes.get(kind)
    return lambda: call(given.q, given.k, given.v, score_mod=change, block_mask=blocks, enable_gqa=grouped)  # type: ignore[no-any-return]


def candidates(program: Program, given: Inputs) -> tuple[dict[str, Call], dict[str, Row]]:
    """The candidates for a program, and why others would need too much memory."""
    tokens, size = given.q.shape[2], given.q.element_size()
    model = program.module()
    scores = HEADS * tokens * tokens * size
    fused = attngraph.compile(model)
    found: dict[str, Call] = {"attngraph": functools.partial(fused, *given.all)}
    left_out: dict[str, Row] = {}
    unfused = {"eager": program.copies * scores, "inductor": program.copies * scores}
    by_hand = {"sdpa": scores if program.module is Alibi else 5 * tokens * tokens}
    for name, bytes_ in {**unfused, **by_hand}.items():
        if bytes_ > LIMIT:
            left_out[name] = {"problem": f"it needs about {bytes_ / 2**30:.0f} GiB"}
        elif name == "eager":
            found[name] = functools.partial(model, *given.all)
        elif name == "inductor":
            found[name] = functools.partial(torch.compile(model, dynamic=False), *given.all)
        elif program.sdpa:
            found[name] = by_sdpa(program, model, given)
    found["flex"] = by_flex(program, model, given)
    return found, left_out


def measured(name: str, tokens: int, dtype: str, rounds: int) -> dict[str, Row]:
    """One program at one size: answers are compared, then all take turns."""
    program = PROGRAMS[name]
    given = make_inputs(program, tokens, DTYPES[dtype])
    torch._dynamo.reset()
    ways, left_out = candidates(program, given)
    found: dict[str, Row] = {}
    answers: dict[str, Tensor] = {}
    for way, call in ways.items():
        start = time.perf_counter()
        answers[way] = call().float()
        found[way] = {"first": time.perf_counter() - start}
    most = 1e-4 if dtype == "float32" else 0.1
    for way, answer in answers.items():
        result = compare(answer, answers["attngraph"])
        if result.problem or result.error > most:
            raise SystemExit(f"{name}, {tokens} tokens, {dtype}: {way} gives another answer: {result}")
        found[way]["differs"] = result.error
    del answers
    timed = times(ways, rounds)
    return {**{way: {**timed[way], **found[way]} for way in ways}, **left_out}


def exponents(_: Options, rows: Sequence[Row]) -> str:
    """The powers of the tokens with which peak memory grows: of each program the slope of a line through the
    logarithms, from 1024 tokens on."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        program, tokens = row["cell"].rsplit(", ", 1)
        count = int(tokens.split()[0])
        if count >= 1024 and row.get("peak_bytes"):
            of = points.setdefault(row["name"], {}).setdefault(program, [])
            of.append((math.log(count), math.log(row["peak_bytes"])))
    lines = []
    for way, programs in points.items():
        slopes = [
            statistics.linear_regression(*zip(*p, strict=True))[0] for p in programs.values() if len(p) > 1
        ]
        if slopes:
            lines.append(
                f"peak memory of {way} grows with tokens ** x, x = {min(slopes):.2f} to {max(slopes):.2f}"
            )
    return "\n".join(lines)


def cells(options: Options) -> Iterator[Cell]:
    torch._dynamo.config.recompile_limit = 1000  # type: ignore[attr-defined]
    logging.getLogger("torch").setLevel(logging.ERROR)
    tokens, dtypes = ([64], ["float32"]) if options.small else (options.tokens, options.dtypes)
    for dtype, name, count in itertools.product(dtypes, options.programs, tokens):
        measure = functools.partial(measured, name, count, dtype, options.rounds)
        yield Cell(f"{name}, {dtype}, {count} tokens", measure)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=7)


SUITE = Suite("attention", __doc__, cells, _arguments, base="attngraph", after=exponents)
MAIN = SUITE.main
