"""Attention on a GPU, in one process and one run: ours, other implementations, and the card's limits.

    python -m workshop gpu --suite attention decode mla --json results.json
    python -m workshop gpu --only causal "width 128" --minutes 9 --json results.json --resume
    python -m workshop gpu --small --device cpu             tiny cells, to see that it works

First the limits are measured: a large matrix product and a large copy. Then, cell by cell, candidates take
turns for some rounds; medians are reported, with the cache emptied before each call. Times are the GPU's; the
host's is said beside them (`codegen/triton/tuning.py`). `attention`: our kernels forward and backward, the
unfused graph if it fits in memory, scaled_dot_product_attention with each of its backends pinned,
FlexAttention with default and with tuned options, torch.compile of the unfused graph. `decode` and `mla`: one
new token of each row over a cache, in bytes (and operations) per second. All candidates run once, and their
results are compared, before anything is timed; for one that cannot be run the reason is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngraph
from attngraph.cli.terminal import TargetError
from attngraph.codegen import triton
from attngraph.codegen.triton.blocks import no_groups
from attngraph.codegen.triton.device import capability
from attngraph.meaning.check.comparison import Rule, compare
from workshop.bench.clock import Clock
from workshop.harness import Cell, Options, Row, Suite

WINDOW, CAP = 1024, 30.0
SUITES = ("attention", "decode", "mla")
UNFUSED_LIMIT = 24 << 30
"""Bytes of scores above which the unfused graph is left out."""
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
GROUPS = ("gluon", "gluon_unordered")
"""Backends of ours that compute by groups of warps, where the card has them."""
NAMES = ("attngraph", *GROUPS, "unfused", "torch.compile", *BACKENDS, "flex", "flex tuned", "sdpa")
"""All candidates."""
Call = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Measured limits of the device, per second: operations of a matrix product, and bytes of a copy."""

    flops: float
    bytes: float


def limits(clock: Clock, dtype: torch.dtype, size: int = 8192) -> Limits:
    a, b = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    source = torch.empty(size * size * 8, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    found = clock.medians({"product": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return Limits(2 * size**3 / found["product"][0], 2 * source.nbytes / found["copy"][0])


class Ready:
    """A cell whose candidates have run once, so that all is compiled, and whose results were compared.
    `operations` and `size` are those of a call, `size` 0 where its bytes are no measure."""

    def __init__(
        self, calls: Mapping[str, Call], operations: float, size: float = 0, compared: bool = True
    ) -> None:
        self.operations, self.size = operations, size
        self.rows: dict[str, Row] = {}
        self.running: dict[str, Call] = {}
        self._wanted: Tensor | None = None
        self._crowded: dict[str, Call] = {}
        self._compared = compared
        for name, call in calls.items():
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
                self.rows[name] = {"problem": f"another answer: {result}"}
                return
        self._wanted = found if self._wanted is None else self._wanted
        self.running[name] = call

    def _fails(self, name: str, problem: Exception) -> None:
        text = (str(problem).splitlines() or [""])[0][:120]
        self.rows[name] = {"problem": f"{type(problem).__name__}: {text}"}

    def timed(self, clock: Clock, limit: Limits) -> dict[str, Row]:
        """The figures. What found no memory while other processes prepared is tried again."""
        for name, call in self._crowded.items():
            try:
                self._run(name, call)
            except Exception as problem:
                self._fails(name, problem)
        self._wanted = None
        for name, (seconds, host) in clock.medians(self.running).items():
            speed = {"tflops": self.operations / seconds / 1e12}
            if self.size:
                speed["gbytes"] = self.size / seconds / 1e9
            share = max(self.operations / seconds / limit.flops, self.size / seconds / limit.bytes)
            self.rows[name] = {"seconds": seconds, **speed, "share": share, "host": host}
        return self.rows


@dataclasses.dataclass(frozen=True)
class Work:
    """A cell: its name, and what makes it ready."""

    name: str
    prepare: Callable[[], Ready]


@dataclasses.dataclass(frozen=True)
class How:
    """How cells are measured: `without` these candidates; `tune` is called with their operands first
    (`triton.tune`). `narrow`: numbers have 16 bits on a CPU too."""

    device: str
    small: bool = False
    without: Collection[str] = ()
    tune: Callable[..., object] | None = None
    narrow: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float16 if self.narrow else torch.float32

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def kept(self, calls: dict[str, Call]) -> dict[str, Call]:
        return {name: call for name, call in calls.items() if name not in self.without}


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


def attention(how: How) -> Iterator[Work]:
    """Cells of (heads, tokens, width), batch 1; forward and backward share their candidates."""
    tokens = (64,) if how.small else (4096, 8192, 16384)
    heads, widths = (2, (16,)) if how.small else (16, (64, 128))
    for name, size, width in itertools.product(CASES, tokens, widths):
        cell = f"{name}, {heads} heads, {size} tokens, width {width}"
        case, operations = CASES[name], 4 * heads * size**2 * width * CASES[name].share(size)
        made = functools.cache(functools.partial(_made, how, case, (1, heads, size, width)))

        def forward(made: Any = made, operations: float = operations) -> Ready:
            return Ready(how.kept(made()[1]), operations)

        def backward(made: Any = made, operations: float = operations) -> Ready:
            operands, calls = made()
            grad = torch.randn_like(operands[0])
            backwards = {n: _Backward(c, operands, grad) for n, c in calls.items()}
            made.cache_clear()
            return Ready(how.kept(backwards), 2.5 * operations)  # type: ignore[arg-type]

        yield Work(cell, forward)
        yield Work(f"{cell}, backward", backward)


def _made(how: How, case: Case, shape: tuple[int, ...]) -> tuple[list[Tensor], dict[str, Call]]:
    _forget()
    q, k, v = operands = [how.noise(*shape).requires_grad_() for _ in "qkv"]
    if how.tune is not None:
        how.tune(case.program(shape[-1]), (q.detach(), k.detach(), v.detach()), gradients=True)
    return operands, _candidates(case, q, k, v)


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
    if no_groups((q, k, v), capability(q.device)) is None:
        by = functools.partial(attngraph.attention, q, k, v, text)
        found |= {name: functools.partial(by, kernel=f"{name}.forward") for name in GROUPS}
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


def decode(how: How) -> Iterator[Work]:
    """One new token of each row: cells of (rows, cached tokens), grouped heads."""
    (heads, keys), width = ((4, 2), 16) if how.small else ((32, 4), 128)
    sizes = ((2, 64),) if how.small else itertools.product((1, 8, 64), (4096, 16384, 65536))

    def ready(rows: int, held: int) -> Ready:
        _forget()
        pages = how.noise(rows, keys, held, width), how.noise(rows, keys, held, width)
        q, *new = how.noise(1, heads, rows, width), *(how.noise(1, keys, rows, width) for _ in "kv")
        calls = _over_cache(q, new, pages, width, how)
        return Ready(calls, 4 * rows * held * heads * width, 2 * pages[0].nbytes, compared=False)

    for rows, held in sizes:
        cell = f"decode, {rows} rows, {held} kept, {heads} heads on {keys}, width {width}"
        yield Work(cell, functools.partial(ready, rows, held))


def _over_cache(
    q: Tensor, new: Sequence[Tensor], pages: tuple[Tensor, Tensor], scaled: int, how: How
) -> dict[str, Call]:
    """Ours over pages and the new tokens, torch's over the pages alone."""
    where = _rows(pages[0].shape[0], pages[0].shape[2], str(q.device))
    text = f"s = {1 / math.sqrt(scaled)} * dot\nkeep k <= q"
    own = q.permute(2, 1, 0, 3)
    if how.tune is not None:
        how.tune(text, (q, new[0], new[1]), cache=(pages, where))

    def ours() -> Tensor:
        found: Tensor = torch.ops.attngraph.cached_attention(q, *new, *pages, [], [], text, *where)
        return found

    flex: Any = torch.compile(flex_attention)
    return how.kept({
        "attngraph": ours,
        "sdpa": lambda: F.scaled_dot_product_attention(own, *pages, enable_gqa=True),
        "flex": lambda: flex(own, *pages, enable_gqa=True),
    })  # fmt: skip


def mla(how: How) -> Iterator[Work]:
    """One new token of each row over latents: cells of (heads, rows, cached tokens)."""
    latent, rope = (16, 16) if how.small else (512, 64)
    sizes = ((4, 2, 64),) if how.small else itertools.product((16, 128), (1, 16, 64), (4096, 16384))

    def ready(heads: int, rows: int, held: int) -> Ready:
        _forget()
        width = latent + rope
        pages, q, new = (
            how.noise(rows, 1, held, width),
            how.noise(1, heads, rows, width),
            how.noise(1, 1, rows, width),
        )
        calls = _over_cache(q, (new, new[..., :latent]), (pages, pages[..., :latent]), 192, how)
        return Ready(calls, 2 * rows * held * heads * (width + latent), pages.nbytes, compared=False)

    for heads, rows, held in sizes:
        cell = f"mla, {rows} rows, {held} kept, {heads} heads, latent {latent} + {rope}"
        yield Work(cell, functools.partial(ready, heads, rows, held))


def _rows(rows: int, held: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Contiguous pages, one for each row, and one new token of each: table, starts, first, held."""
    table = torch.arange(rows, device=device).unsqueeze(1)
    kept = torch.full((rows,), held, device=device)
    return table, torch.arange(rows + 1, device=device), kept, kept


# --- a run ---


def works(how: How, suites: Collection[str] = SUITES) -> Iterator[Work]:
    for name, make in (("attention", attention), ("decode", decode), ("mla", mla)):
        if name in suites:
            yield from make(how)


@functools.cache
def _limits(device: str, small: bool) -> tuple[Clock, Limits]:
    clock = Clock(device)
    return clock, limits(clock, How(device).dtype, 256 if small else 8192)


def cells(options: Options) -> Iterator[Cell]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise TargetError(
            "--device cuda: PyTorch finds no GPU here; --device cpu --small shows that it works."
        )
    if options.device == "cpu" and not options.small:
        raise TargetError(
            "--device cpu measures tiny cells, with --small; `attention` is the suite of a CPU."
        )
    how = How(options.device, options.small, options.without, triton.tune if options.tune else None)
    for work in works(how, options.suite):
        yield Cell(work.name, lambda work=work: work.prepare().timed(*_limits(how.device, how.small)))  # type: ignore[misc]


def facts(options: Options) -> Row:
    """Of the card, with its measured limits."""
    _, limit = _limits(options.device, options.small)
    return about(How(options.device)) | {"limits": dataclasses.asdict(limit)}


def about(how: How) -> Row:
    name = torch.cuda.get_device_name() if how.device == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "dtype": str(how.dtype)}


def told(found: Row) -> str:
    """The device and its limits, of what `facts` or a task of `card` says."""
    flops, size = found["limits"]["flops"] / 1e12, found["limits"]["bytes"] / 1e9
    where = f"{found['device']}, torch {found['torch']}, {found['dtype']}"
    return f"{where}: {flops:.1f} TFLOP/s in a product, {size:.0f} GB/s in a copy"


def _arguments(parser: argparse.ArgumentParser) -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=here, help="default: the GPU if there is one"
    )
    parser.add_argument("--suite", nargs="+", default=["attention"], choices=SUITES)
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave out these candidates")
    parser.add_argument("--tune", action="store_true", help="measure our block sizes first, and store them")


MAIN = Suite(
    "gpu", __doc__, cells, _arguments, facts, base="attngraph", bar="share", gradients=True,
    after=lambda options, rows: told(facts(options)),
).main  # fmt: skip
