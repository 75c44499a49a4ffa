"""Attention on a GPU, in one process and one run: ours, other implementations, and the card's limits.

    python -m workshop bench --device cuda --suite attention decode mla --json results.json
    python -m workshop bench --device cuda --only causal "width 128" --minutes 9 --json results.json --resume

First the limits are measured: a large matrix product and a large copy. Then, cell by cell, candidates take
turns for some rounds; medians are reported, with the cache emptied before each call. Times are the GPU's; the
host's is said beside them (`codegen/triton/tuning.py`). `attention`: our kernels forward and backward, the
unfused graph if it fits in memory, scaled_dot_product_attention with each of its backends pinned,
FlexAttention with default and with tuned options, torch.compile of the unfused graph. `decode` and `mla`: one
new token of each row over a cache, in bytes (and operations) per second. All candidates run once, and their
results are compared, before anything is timed; for one that cannot be run the reason is reported. A run may
measure only some cells, and continue from a file of earlier ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
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
from attngraph.codegen import triton
from attngraph.codegen.triton.tuning import Clock
from attngraph.meaning.check.comparison import Rule, compare
from workshop.bench.plot import Bars

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
    """Measured limits of the device, per second: operations of a matrix product, and bytes of a copy."""

    flops: float
    bytes: float


@dataclasses.dataclass
class Row:
    """One candidate in one cell: seconds, operations and bytes per second and their share of the limit, or
    why it was not measured; and the seconds in which the host launches it."""

    cell: str
    name: str
    seconds: float | None = None
    tflops: float | None = None
    gbytes: float | None = None
    share: float | None = None
    problem: str = ""
    host: float | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a suite to measure: cells whose names contain all of `only` and are not in `done`, without
    the candidates in `without`, until `deadline` (by `time.monotonic`). `tune`: first measure our block sizes
    for each cell, and store them."""

    only: Sequence[str] = ()
    without: Sequence[str] = ()
    done: frozenset[str] = frozenset()
    deadline: float = math.inf
    tune: bool = False

    def has(self, cell: str) -> bool:
        return all(text in cell for text in self.only) and cell not in self.done

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


def limits(clock: Clock, dtype: torch.dtype, size: int = 8192) -> Limits:
    a, b = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    source = torch.empty(size * size * 8, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    found = clock.medians({"product": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return Limits(2 * size**3 / found["product"][0], 2 * source.nbytes / found["copy"][0])


# --- whole sequences ---


@dataclasses.dataclass(frozen=True)
class Case:
    """A program in the form that each candidate takes. `share`: the fraction of all pairs that it keeps;
    `sdpa`: whether scaled_dot_product_attention can express it without a mask tensor."""

    text: str
    sdpa: bool
    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None

    def program(self, width: int) -> str:
        return self.text.format(scale=1 / math.sqrt(width))

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
    limit: Callable[[], Limits], say: Say, part: Part,
) -> Iterator[Row]:  # fmt: skip
    """Cells of (heads, tokens, width), batch 1."""
    for name, (heads, tokens, width) in itertools.product(cases, sizes):
        cell = f"{name}, {heads} heads, {tokens} tokens, width {width}"
        wanted = [part.has(cell), part.has(f"{cell}, backward")]
        if part.is_over or not any(wanted):
            continue
        say(cell)
        _forget()
        shape = (1, heads, tokens, width)
        q, k, v = (torch.randn(shape, device=clock.device).to(dtype).requires_grad_() for _ in "qkv")
        if part.tune:
            triton.tune(CASES[name].program(width), (q.detach(), k.detach(), v.detach()), gradients=True)
        candidates = _candidates(CASES[name], q, k, v)
        operations = 4 * heads * tokens**2 * width * CASES[name].share(tokens)
        found: list[tuple[_Prepared, float]] = []
        if wanted[0]:
            found.append((_Prepared(cell, candidates, part), operations))
        if wanted[1]:
            grad = torch.randn_like(q)
            backwards = {n: _Backward(c, (q, k, v), grad) for n, c in candidates.items()}
            found.append((_Prepared(f"{cell}, backward", backwards, part), 2.5 * operations))
        for one, needed in found:
            yield from one.timed(clock, needed, 0, limit())


def _forget() -> None:
    """Free what the last cell compiled and allocated. Otherwise PyTorch would compile for dynamic sizes from
    the second size on, and after a few sizes run the function eagerly."""
    torch.compiler.reset()
    _forget_memory()


def _forget_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _candidates(case: Case, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    scale = 1 / math.sqrt(q.shape[-1])
    text, tokens = case.program(q.shape[-1]), q.shape[2]
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
    """The program as a textbook writes it, with the whole score matrix."""
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)[None, :]
    h = torch.arange(q.shape[1], device=q.device)[:, None, None]
    scores = q @ k.mT * scale
    if case.score is not None:
        scores = case.score(scores, 0, h, i, j).to(q.dtype)
    if case.mask is not None:
        scores = scores.masked_fill(~case.mask(0, h, i, j), -math.inf)
    return torch.softmax(scores, -1) @ v


class _Backward:
    """The backward pass alone: the forward pass is run once, beforehand."""

    def __init__(self, call: Call, inputs: Sequence[Tensor], grad: Tensor) -> None:
        self._call, self._inputs, self._grad = call, list(inputs), grad
        self._kept: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._kept is None:
            self._kept = self._call()
        return torch.autograd.grad(self._kept, self._inputs, self._grad, retain_graph=True)[0]

    def forget(self) -> None:
        """Free what the forward pass kept."""
        self._kept = None


# --- over a cache ---


def decode(
    clock: Clock, cells: Sequence[tuple[int, int]], dtype: torch.dtype,
    limit: Callable[[], Limits], say: Say, part: Part, heads: tuple[int, int] = (32, 4), width: int = 128,
) -> Iterator[Row]:  # fmt: skip
    """One new token of each row: cells of (rows, cached tokens), grouped heads."""
    for rows, held in cells:
        cell = f"decode, {rows} rows, {held} kept, {heads[0]} heads on {heads[1]}, width {width}"
        if part.is_over or not part.has(cell):
            continue
        say(cell)
        _forget()
        k, v = (torch.randn(rows, heads[1], held, width, device=clock.device).to(dtype) for _ in "kv")
        q = torch.randn(1, heads[0], rows, width, device=clock.device).to(dtype)
        new = [torch.randn(1, heads[1], rows, width, device=clock.device).to(dtype) for _ in "kv"]
        calls = _over_cache(q, new, (k, v), width, part)
        operations, size = 4 * rows * held * heads[0] * width, k.nbytes + v.nbytes
        yield from _Prepared(cell, calls, part, compared=False).timed(clock, operations, size, limit())


def _over_cache(
    q: Tensor, new: Sequence[Tensor], pages: tuple[Tensor, Tensor], scaled: int, part: Part
) -> dict[str, Call]:
    """Ours over pages and the new tokens, torch's over the pages alone."""
    where = _rows(pages[0].shape[0], pages[0].shape[2], str(q.device))
    text = f"s = {1 / math.sqrt(scaled)} * dot\nkeep k <= q"
    own = q.permute(2, 1, 0, 3)
    if part.tune:
        triton.tune(text, (q, new[0], new[1]), cache=(pages, where))

    def ours() -> Tensor:
        found: Tensor = torch.ops.attngraph.cached_attention(q, *new, *pages, [], [], text, *where)
        return found

    flex: Any = torch.compile(flex_attention)
    return {
        "attngraph": ours,
        "sdpa": lambda: F.scaled_dot_product_attention(own, *pages, enable_gqa=True),
        "flex": lambda: flex(own, *pages, enable_gqa=True),
    }


def mla(
    clock: Clock, cells: Sequence[tuple[int, int, int]], dtype: torch.dtype,
    limit: Callable[[], Limits], say: Say, part: Part, latent: int = 512, rope: int = 64,
) -> Iterator[Row]:  # fmt: skip
    """One new token of each row over latents: cells of (rows, heads, cached tokens)."""
    for rows, heads, held in cells:
        cell = f"mla, {rows} rows, {held} kept, {heads} heads, latent {latent} + {rope}"
        if part.is_over or not part.has(cell):
            continue
        say(cell)
        _forget()
        width = latent + rope
        pages = torch.randn(rows, 1, held, width, device=clock.device).to(dtype)
        q = torch.randn(1, heads, rows, width, device=clock.device).to(dtype)
        new = torch.randn(1, 1, rows, width, device=clock.device).to(dtype)
        parts = (pages, pages[..., :latent])
        calls = _over_cache(q, (new, new[..., :latent]), parts, 192, part)
        operations = 2 * rows * held * heads * (width + latent)
        ready = _Prepared(cell, calls, part, compared=False)
        yield from ready.timed(clock, operations, pages.nbytes, limit())


def _rows(rows: int, held: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Contiguous pages, one for each row, and one new token of each: table, starts, first, held."""
    table = torch.arange(rows, device=device).unsqueeze(1)
    kept = torch.full((rows,), held, device=device)
    return table, torch.arange(rows + 1, device=device), kept, kept


class _Prepared:
    """A cell whose candidates have run once, so that all is compiled, and whose results were compared."""

    def __init__(self, cell: str, calls: Mapping[str, Call], part: Part, compared: bool = True) -> None:
        self.cell = cell
        self.problems: list[Row] = []
        self.running: dict[str, Call] = {}
        self._wanted: Tensor | None = None
        self._crowded: dict[str, Call] = {}
        self._compared = compared
        for name, call in ((n, c) for n, c in calls.items() if n not in part.without):
            try:
                self._run(name, call)
            except torch.OutOfMemoryError:
                self._crowded[name] = call
            except Exception as problem:
                self._fails(name, problem)
            if isinstance(call, _Backward):
                call.forget()
        _forget_memory()

    def _run(self, name: str, call: Call) -> None:
        found = call().detach().float()
        if self._compared and self._wanted is not None:
            result = compare(found, self._wanted, Rule(0.05))
            if not result.holds:
                self.problems.append(Row(self.cell, name, problem=f"another answer: {result}"))
                return
        self._wanted = found if self._wanted is None else self._wanted
        self.running[name] = call

    def _fails(self, name: str, problem: Exception) -> None:
        text = (str(problem).splitlines() or [""])[0][:120]
        self.problems.append(Row(self.cell, name, problem=f"{type(problem).__name__}: {text}"))

    def timed(self, clock: Clock, operations: float, size: float, limit: Limits) -> Iterator[Row]:
        """A row for each candidate. What found no memory while other processes prepared is tried again."""
        for name, call in self._crowded.items():
            try:
                self._run(name, call)
            except Exception as problem:
                self._fails(name, problem)
        self._wanted = None
        yield from self.problems
        for name, (seconds, host) in clock.medians(self.running).items():
            tflops, gbytes = operations / seconds / 1e12, size / seconds / 1e9
            share = max(operations / seconds / limit.flops, size / seconds / limit.bytes)
            yield Row(self.cell, name, seconds, tflops, gbytes if size else None, share, host=host)


# --- a run ---

SUITES = ("attention", "decode", "mla")
Keep = Callable[[dict[str, Any], list[Row]], None]


def run(
    suites: Sequence[str], device: str = "cuda", dtype: torch.dtype = torch.bfloat16, small: bool = False,
    say: Say | None = None, part: Part | None = None, keep: Keep | None = None,
    turn: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], list[Row]]:  # fmt: skip
    """Measure suites and return a description of the machine, and all rows.

    Args:
        small: measure a few tiny cells, to see that it works.
        part: the part of the suites to measure.
        keep: called after every cell with the results so far.
        turn: called when the first cell's candidates have run once; it returns when the device is free.
    """
    part = part or Part()
    say = say or (lambda what: print(f"... {what}", file=sys.stderr, flush=True))
    clock = Clock(device, turn)

    @functools.cache
    def limit() -> Limits:
        say("limits of the device")
        return limits(clock, dtype, 256 if small else 8192)

    found: list[Iterator[Row]] = []
    if "attention" in suites:
        tokens = (64,) if small else (4096, 8192, 16384)
        sizes = [(2 if small else 16, t, d) for d in ((16,) if small else (64, 128)) for t in tokens]
        found.append(attention(clock, sizes, list(CASES), dtype, limit, say, part))
    if "decode" in suites:
        cells = [(2, 64)] if small else [(b, t) for b in (1, 8, 64) for t in (4096, 16384, 65536)]
        found.append(decode(clock, cells, dtype, limit, say, part, *(((4, 2), 16) if small else ())))
    if "mla" in suites:
        three = [(2, 4, 64)] if small else [
            (b, h, t) for h in (16, 128) for b in (1, 16, 64) for t in (4096, 16384)
        ]  # fmt: skip
        found.append(mla(clock, three, dtype, limit, say, part, *((16, 16) if small else ())))
    name = torch.cuda.get_device_name() if clock.is_cuda else "cpu"
    about = {
        "device": name, "torch": torch.__version__, "dtype": str(dtype), "date": time.strftime("%Y-%m-%d"),
        "limits": {},
    }  # fmt: skip
    rows: list[Row] = []
    for _, cell in itertools.groupby(itertools.chain.from_iterable(found), key=lambda row: row.cell):
        rows += cell
        about["limits"] = dataclasses.asdict(limit())
        if keep is not None:
            keep(about, rows)
    return {**about, "limits": dataclasses.asdict(limit())}, rows


def table(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results as text."""
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
            continue
        speed = f"{row.tflops:8.1f} TFLOP/s" if row.gbytes is None else f"{row.gbytes:8.0f} GB/s"
        host = "" if row.host is None else f", launched in {row.host * 1e6:.0f} us"
        lines.append(
            f"  {row.name:16} {row.seconds * 1e3:9.3f} ms {speed} {row.share:6.0%} of the limit{host}"
        )
    return "\n".join([*lines, *_not_measured(rows)])


def _not_measured(rows: Sequence[Row]) -> list[str]:
    """Why candidates were not measured, each reason once."""
    names: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.seconds is None:
            counts = names.setdefault(row.problem, {})
            counts[row.name] = counts.get(row.name, 0) + 1
    lines = ["", "not measured"] if names else []
    for problem, counts in names.items():
        lines.append(f"  {', '.join(counts)} ({max(counts.values())} cells): {problem}")
    return lines


def bars(about: dict[str, Any], rows: Sequence[Row]) -> Bars:
    """Shares of the measured limits."""
    cells: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.share is not None:
            cells.setdefault(row.cell, {})[row.name] = 100 * row.share
    title = f"{about['device']}, torch {about['torch']}, {about['date']}"
    return Bars(title, "% of the limit that was measured", cells)
