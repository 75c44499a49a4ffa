"""One attention on the CPU, by five ways of computing it, side by side.

    python -m workshop.bench.attention_cpu --json results.json
    python -m workshop.bench.attention_cpu --tokens 2048 --programs causal,alibi

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
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngraph
from attngraph.meaning.check.comparison import compare
from attngraph.runtime.measure import Measurement, measure
from workshop.bench.plot import Bars

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


def candidates(program: Program, given: Inputs, log: Callable[[str], None]) -> dict[str, Call]:
    """The candidates for a program, without those that would need too much memory."""
    tokens, size = given.q.shape[2], given.q.element_size()
    model = program.module()
    scores = HEADS * tokens * tokens * size
    fused = attngraph.compile(model)
    found: dict[str, Call] = {"attngraph": functools.partial(fused, *given.all)}
    unfused = {"eager": program.copies * scores, "inductor": program.copies * scores}
    by_hand = {"sdpa": scores if program.module is Alibi else 5 * tokens * tokens}
    for name, bytes_ in {**unfused, **by_hand}.items():
        if bytes_ > LIMIT:
            log(f"{name} left out: it needs about {bytes_ / 2**30:.0f} GiB")
        elif name == "eager":
            found[name] = functools.partial(model, *given.all)
        elif name == "inductor":
            found[name] = functools.partial(torch.compile(model, dynamic=False), *given.all)
        elif program.sdpa:
            found[name] = by_sdpa(program, model, given)
    found["flex"] = by_flex(program, model, given)
    return found


def run(name: str, tokens: int, dtype: str, rounds: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure one program at one size; a row of the results."""
    program = PROGRAMS[name]
    given = make_inputs(program, tokens, DTYPES[dtype])
    torch._dynamo.reset()
    ways = candidates(program, given, log)
    first: dict[str, float] = {}
    answers: dict[str, Tensor] = {}
    for way, call in ways.items():
        start = time.perf_counter()
        answers[way] = call()
        first[way] = time.perf_counter() - start
    ours = answers["attngraph"].float()
    results = {way: compare(answer.float(), ours) for way, answer in answers.items()}
    differs = {way: result.error for way, result in results.items()}
    most = 1e-4 if dtype == "float32" else 0.1
    if any(result.problem or result.error > most for result in results.values()):
        shown = {way: str(result) for way, result in results.items()}
        raise SystemExit(f"{name}, {tokens} tokens, {dtype}: the answers differ: {shown}")
    del answers
    found: dict[str, Measurement] = measure(ways, rounds=rounds, seconds=60.0)
    return {
        "program": name, "tokens": tokens, "dtype": dtype, "differs": differs, "first_call_seconds": first,
        **{way: dataclasses.asdict(result) for way, result in found.items()},
    }  # fmt: skip


WAYS = ("attngraph", "eager", "inductor", "sdpa", "flex")


def line(row: dict[str, Any]) -> str:
    """One row of the table: our time, and how many times longer and larger the others are."""
    ours = row["attngraph"]
    text = f"{row['program']:14} {row['dtype']:9} {row['tokens']:6} {ours['seconds'] * 1e3:9.1f}"
    text += f"{ours['peak_bytes'] / 2**20:9.1f}  "
    for way in WAYS[1:]:
        other = row.get(way)
        text += f"{other['seconds'] / ours['seconds']:9.2f}x" if other else f"{'-':>10}"
    text += "  "
    for way in WAYS[1:]:
        other = row.get(way)
        text += f"{other['peak_bytes'] / 2**20:10.1f}" if other else f"{'-':>10}"
    return text


HEAD = (
    f"{'program':14} {'dtype':9} {'tokens':>6} {'ours, ms':>9}{'MiB':>9}  "
    + "".join(f"{way:>10}" for way in WAYS[1:])
    + "  "
    + "".join(f"{way + ' MiB':>14}"[-10:] for way in WAYS[1:])
)


def exponents(rows: Sequence[dict[str, Any]], way: str) -> dict[str, float]:
    """The power of the tokens with which peak memory grows, for each program: the slope of a line through
    the logarithms, from 1024 tokens on."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["tokens"] >= 1024 and way in row and row[way]["peak_bytes"]:
            point = math.log(row["tokens"]), math.log(row[way]["peak_bytes"])
            points.setdefault(f"{row['program']} {row['dtype']}", []).append(point)
    return {
        name: statistics.linear_regression(*zip(*p, strict=True))[0]
        for name, p in points.items()
        if len(p) > 1
    }


def bars(result: dict[str, Any]) -> Bars:
    """Times of all candidates, from what `--json` writes."""
    cells = {
        f"{row['program']}, {row['dtype']}, {row['tokens']}": {
            way: row[way]["seconds"] * 1e3 for way in WAYS if way in row
        }
        for row in result["rows"]
    }
    title = f"attention, {HEADS} heads of width {WIDTH}, torch {result['torch']}, {result['threads']} threads"
    return Bars(title, "milliseconds", cells, log=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma-separated")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="comma-separated")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", metavar="FILE", help="write all results here")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 1000  # type: ignore[attr-defined]
    logging.getLogger("torch").setLevel(logging.ERROR)

    def log(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    print(
        f"torch {torch.__version__}, {options.threads} threads; times and MiB; others relative to attngraph"
    )
    print(HEAD, flush=True)
    with torch.no_grad():
        for dtype in options.dtypes.split(","):
            for name in options.programs.split(","):
                for tokens in map(int, options.tokens.split(",")):
                    rows.append(run(name, tokens, dtype, options.rounds, log))
                    print(line(rows[-1]), flush=True)
                    if options.json:
                        _write(options, rows)
    for way in WAYS:
        slopes = exponents(rows, way)
        if slopes:
            least, most = min(slopes.values()), max(slopes.values())
            print(f"peak memory of {way} grows with tokens ** x, x = {least:.2f} to {most:.2f}")
    return 0


def _write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    result = {
        "torch": torch.__version__, "threads": options.threads, "heads": HEADS, "width": WIDTH,
        "rows": rows, "memory_exponents": {way: exponents(rows, way) for way in WAYS},
    }  # fmt: skip
    Path(options.json).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
