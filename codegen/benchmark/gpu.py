"""Attention on a GPU, in one process and one run: ours beside what else there is, and the card's limits.

    attngraph bench --device cuda --suite attention decode mla --json results.json

First the limits are measured: a large matrix product and a large copy. Then, cell by cell, candidates take
turns for some rounds with the cache emptied before each; medians are kept. `attention`: our kernels forward
and backward, the unfused graph where it fits, scaled_dot_product_attention with each of its backends pinned,
FlexAttention as it comes and tuned, torch.compile of the unfused graph. `decode` and `mla`: one new token
of each row over a cache, in bytes (and operations) a second. Whole sequences' answers are compared before
anything is timed; a candidate that cannot be run says why.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngraph
from attngraph.codegen.benchmark.plot import Bars

ROUNDS = 9
WINDOW, CAP = 1024, 30.0
UNFUSED_LIMIT = 24 << 30
"""Bytes of scores above which the unfused graph is left out."""
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Call = Callable[[], Tensor]
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the device was seen to do: operations of a matrix product and bytes of a copy, in a second."""

    flops: float
    bytes: float


@dataclasses.dataclass
class Row:
    """One candidate in one cell: seconds, operations and bytes a second and their share of the limit, or why
    there are none."""

    cell: str
    name: str
    seconds: float | None = None
    tflops: float | None = None
    gbytes: float | None = None
    share: float | None = None
    problem: str = ""


class Clock:
    """Times calls on a device, with its cache emptied before each."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_cuda = device.startswith("cuda")
        self.flush = torch.empty(64 << 20 if self.is_cuda else 1, dtype=torch.int32, device=device)

    def once(self, call: Callable[[], object]) -> float:
        self.flush.zero_()
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        event: Any = torch.cuda.Event
        before, after = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    def medians(self, calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
        """Seconds of each, taken in turns."""
        for call in calls.values():
            self.once(call)
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                spent[name].append(self.once(call))
        return {name: statistics.median(found) for name, found in spent.items()}


def limits(clock: Clock, dtype: torch.dtype, size: int = 8192) -> Limits:
    a, b = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    source = torch.empty(size * size * 8, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    found = clock.medians({"product": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return Limits(2 * size**3 / found["product"], 2 * source.nbytes / found["copy"])


# --- whole sequences ---


@dataclasses.dataclass(frozen=True)
class Case:
    """A program in the terms of each candidate. `share`: the part of all pairs that it keeps; `sdpa`: whether
    scaled_dot_product_attention can express it without a mask tensor."""

    text: str
    sdpa: bool
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None

    def share(self, tokens: int) -> float:
        if "q - k <" in self.text:
            window = min(WINDOW, tokens)
            return (window * tokens - window * (window - 1) / 2) / tokens**2
        return 0.5 + 0.5 / tokens if "k <= q" in self.text else 1.0


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def _window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (q - k < WINDOW)


def _softcap(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return CAP * torch.tanh(s / CAP)


def _alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + torch.exp2(-(h + 1.0)) * (k - q)


CASES = {
    "full": Case("s = {scale} * dot", True),
    "causal": Case("s = {scale} * dot; keep k <= q", True, None, _causal),
    "window": Case(f"s = {{scale}} * dot; keep k <= q and q - k < {WINDOW}", False, None, _window),
    "softcap": Case(f"s = {CAP} * tanh({{scale}} * dot / {CAP}); keep k <= q", False, _softcap, _causal),
    "alibi": Case(
        "s = {scale} * dot + 2 ** -float(h + 1) * float(k - q); keep k <= q", False, _alibi, _causal
    ),
}  # fmt: skip


def attention(
    clock: Clock, sizes: Sequence[tuple[int, int, int]], cases: Sequence[str], dtype: torch.dtype,
    limit: Limits, say: Say, backward: bool = True,
) -> Iterator[Row]:  # fmt: skip
    """Cells of (heads, tokens, width), batch 1."""
    for name in cases:
        for heads, tokens, width in sizes:
            cell = f"{name}, {heads} heads, {tokens} tokens, width {width}"
            say(cell)
            shape = (1, heads, tokens, width)
            q, k, v = (torch.randn(shape, device=clock.device).to(dtype).requires_grad_() for _ in "qkv")
            candidates = _candidates(CASES[name], q, k, v)
            operations = 4 * heads * tokens**2 * width * CASES[name].share(tokens)
            yield from _measured(clock, cell, candidates, operations, 0, limit)
            if backward:
                grad = torch.randn_like(q)
                backwards = {n: _backward(call, (q, k, v), grad) for n, call in candidates.items()}
                yield from _measured(clock, f"{cell}, backward", backwards, 2.5 * operations, 0, limit)


def _candidates(case: Case, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    scale = 1 / math.sqrt(q.shape[-1])
    text, tokens = case.text.format(scale=scale), q.shape[2]
    found: dict[str, Call] = {"attngraph": lambda: attngraph.attention(q, k, v, text)}
    if q.shape[1] * tokens**2 * 4 * 3 <= UNFUSED_LIMIT:
        found["unfused"] = lambda: _unfused(case, q, k, v, scale)
        compiled = torch.compile(_unfused)
        found["torch.compile"] = lambda: compiled(case, q, k, v, scale)
    if case.sdpa:
        for name, backend in BACKENDS.items():
            found[name] = _pinned(backend, q, k, v, is_causal=case.mask is not None)
    flex: Any = torch.compile(flex_attention)
    tuned: Any = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
    block: Any = None
    if case.mask is not None:
        block = create_block_mask(case.mask, None, None, tokens, tokens, device=str(q.device))
    found["flex"] = lambda: flex(q, k, v, case.score, block, scale)
    found["flex tuned"] = lambda: tuned(q, k, v, case.score, block, scale)
    return found


def _pinned(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Call:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return run


def _unfused(case: Case, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The program as a textbook writes it, whole score matrix and all."""
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)[None, :]
    h = torch.arange(q.shape[1], device=q.device)[:, None, None]
    scores = q @ k.mT * scale
    if case.score is not None:
        scores = case.score(scores, 0, h, i, j).to(q.dtype)
    if case.mask is not None:
        scores = scores.masked_fill(~case.mask(0, h, i, j), -math.inf)
    return torch.softmax(scores, -1) @ v


def _backward(call: Call, inputs: Sequence[Tensor], grad: Tensor) -> Call:
    """The backward pass alone: the forward one is run once."""
    kept: list[Tensor] = []

    def run() -> Tensor:
        if not kept:
            kept.append(call())
        return torch.autograd.grad(kept[0], list(inputs), grad, retain_graph=True)[0]

    return run


# --- over a cache ---


def decode(
    clock: Clock, cells: Sequence[tuple[int, int]], dtype: torch.dtype, limit: Limits, say: Say,
    heads: tuple[int, int] = (32, 4), width: int = 128,
) -> Iterator[Row]:  # fmt: skip
    """One new token of each row: cells of (rows, kept tokens), grouped heads."""
    for rows, held in cells:
        cell = f"decode, {rows} rows, {held} kept, {heads[0]} heads on {heads[1]}, width {width}"
        say(cell)
        k, v = (torch.randn(rows, heads[1], held, width, device=clock.device).to(dtype) for _ in "kv")
        q = torch.randn(1, heads[0], rows, width, device=clock.device).to(dtype)
        new = [torch.randn(1, heads[1], rows, width, device=clock.device).to(dtype) for _ in "kv"]
        calls = _over_cache(q, new, (k, v), width)
        operations, size = 4 * rows * held * heads[0] * width, k.nbytes + v.nbytes
        yield from _measured(clock, cell, calls, operations, size, limit, compared=False)


def _over_cache(
    q: Tensor, new: Sequence[Tensor], pages: tuple[Tensor, Tensor], scaled: int
) -> dict[str, Call]:
    """Ours over pages and the new tokens, torch's over the pages alone."""
    where = _rows(pages[0].shape[0], pages[0].shape[2], str(q.device))
    text = f"s = {1 / math.sqrt(scaled)} * dot\nkeep k <= q"
    own = q.permute(2, 1, 0, 3)

    def ours() -> Tensor:
        found: Tensor = torch.ops.attngraph.cached_attention(q, *new, *pages, [], [], text, *where)
        return found

    return {
        "attngraph": ours,
        "sdpa": lambda: F.scaled_dot_product_attention(own, *pages, enable_gqa=True),
    }


def mla(
    clock: Clock, cells: Sequence[tuple[int, int, int]], dtype: torch.dtype, limit: Limits, say: Say,
    latent: int = 512, rope: int = 64,
) -> Iterator[Row]:  # fmt: skip
    """One new token of each row over latents: cells of (rows, heads, kept tokens)."""
    for rows, heads, held in cells:
        cell = f"mla, {rows} rows, {held} kept, {heads} heads, latent {latent} + {rope}"
        say(cell)
        width = latent + rope
        pages = torch.randn(rows, 1, held, width, device=clock.device).to(dtype)
        q = torch.randn(1, heads, rows, width, device=clock.device).to(dtype)
        new = torch.randn(1, 1, rows, width, device=clock.device).to(dtype)
        parts = (pages, pages[..., :latent])
        calls = _over_cache(q, (new, new[..., :latent]), parts, 192)
        operations = 2 * rows * held * heads * (width + latent)
        yield from _measured(clock, cell, calls, operations, pages.nbytes, limit, compared=False)


def _rows(rows: int, held: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Contiguous pages, one for each row, and one new token of each: table, starts, first, held."""
    table = torch.arange(rows, device=device).unsqueeze(1)
    kept = torch.full((rows,), held, device=device)
    return table, torch.arange(rows + 1, device=device), kept, kept


def _measured(
    clock: Clock, cell: str, calls: dict[str, Call], operations: float, size: float, limit: Limits,
    compared: bool = True,
) -> Iterator[Row]:  # fmt: skip
    """A row for each candidate: those that run and agree with the first are timed."""
    running: dict[str, Call] = {}
    wanted: Tensor | None = None
    for name, call in calls.items():
        try:
            found = call().float()
        except Exception as problem:
            yield Row(cell, name, problem=f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}")
            continue
        if compared and wanted is not None:
            error = float((found - wanted).abs().max())
            if not error <= 0.05 * float(wanted.abs().max()):
                yield Row(cell, name, problem=f"another answer: {error:.2g} away")
                continue
        wanted = found if wanted is None else wanted
        running[name] = call
    for name, seconds in clock.medians(running).items():
        tflops, gbytes = operations / seconds / 1e12, size / seconds / 1e9
        share = max(operations / seconds / limit.flops, size / seconds / limit.bytes)
        yield Row(cell, name, seconds, tflops, gbytes if size else None, share)


# --- a run ---

SUITES = ("attention", "decode", "mla")


def run(
    suites: Sequence[str], device: str = "cuda", dtype: torch.dtype = torch.bfloat16, small: bool = False,
    say: Say | None = None,
) -> tuple[dict[str, Any], list[Row]]:  # fmt: skip
    """Measure suites; about the machine, and all rows. `small`: a few tiny cells, to see that it works."""
    say = say or (lambda what: print(f"... {what}", file=sys.stderr, flush=True))
    clock = Clock(device)
    say("limits of the device")
    limit = limits(clock, dtype, 256 if small else 8192)
    rows: list[Row] = []
    if "attention" in suites:
        tokens = (64,) if small else (4096, 8192, 16384)
        sizes = [(2 if small else 16, t, d) for d in ((16,) if small else (64, 128)) for t in tokens]
        rows += attention(clock, sizes, list(CASES), dtype, limit, say)
    if "decode" in suites:
        cells = [(2, 64)] if small else [(b, t) for b in (1, 8, 64) for t in (4096, 16384, 65536)]
        rows += decode(clock, cells, dtype, limit, say, *(((4, 2), 16) if small else ()))
    if "mla" in suites:
        three = [(2, 4, 64)] if small else [
            (b, h, t) for h in (16, 128) for b in (1, 16, 64) for t in (4096, 16384)
        ]  # fmt: skip
        rows += mla(clock, three, dtype, limit, say, *((16, 16) if small else ()))
    name = torch.cuda.get_device_name() if clock.is_cuda else "cpu"
    about = {
        "device": name, "torch": torch.__version__, "dtype": str(dtype), "date": time.strftime("%Y-%m-%d"),
        "limits": dataclasses.asdict(limit),
    }  # fmt: skip
    return about, rows


def table(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """For people."""
    limit = about["limits"]
    lines = [
        f"{about['device']}, torch {about['torch']}, {about['dtype']}: "
        f"{limit['flops'] / 1e12:.1f} TFLOP/s in a product, {limit['bytes'] / 1e9:.0f} GB/s in a copy"
    ]
    cell = ""
    for row in rows:
        if row.cell != cell:
            cell = row.cell
            lines += ["", cell]
        if row.seconds is None:
            lines.append(f"  {row.name:16} {row.problem}")
            continue
        speed = f"{row.tflops:8.1f} TFLOP/s" if row.gbytes is None else f"{row.gbytes:8.0f} GB/s"
        lines.append(f"  {row.name:16} {row.seconds * 1e3:9.3f} ms {speed} {row.share:6.0%} of the limit")
    return "\n".join(lines)


def bars(about: dict[str, Any], rows: Sequence[Row]) -> Bars:
    """Shares of the limit that was measured."""
    cells: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.share is not None:
            cells.setdefault(row.cell, {})[row.name] = 100 * row.share
    title = f"{about['device']}, torch {about['torch']}, {about['date']}"
    return Bars(title, "% of the limit that was measured", cells)
