"""Whole models on the CPU, called once or trained a step: beside eager, torch.compile, and where they are
installed OpenVINO and onnxruntime.

    python -m workshop whole --json docs/measured/whole.json --plot whole.png

Stock models of transformers with random weights, six layers (Whisper's four, Swin two in each stage), a
padded batch of sentences whose tokens are averaged, and a block of a UNet. Every candidate has a process of
its own, and all take turns, round after round. The floor is the time that the cell's multiplications take at
the speed of a large product, measured in the same run; it counts padding, too. Results are compared with
eager's before anything is timed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from workshop.bench import models
from workshop.bench.peers.engines import whole_onnxruntime, whole_openvino
from workshop.bench.peers.suite import Failure, ask
from workshop.harness import Cell, Options, Row, Suite, installed, short
from workshop.processes import Server

EAGER, COMPILE, FROZEN, OURS = "eager", "torch.compile", "torch.compile, frozen", "attngraph"
OURS_FROZEN, OPENVINO, ONNX = "attngraph, frozen", "OpenVINO", "onnxruntime"
KEEPING: Mapping[str, tuple[str, ...]] = {
    FROZEN: (), OPENVINO: ("openvino",), ONNX: ("onnxruntime", "onnx", "onnxscript"), OURS_FROZEN: (),
}  # fmt: skip
"""Candidates that keep weights as they were, which no training has, and the packages that they need."""
CANDIDATES = (EAGER, COMPILE, OURS, *KEEPING)
NOISE = 1.03
"""A cell is lost where the best of the others is faster by more than this."""
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""The largest accepted difference from eager's result, relative to its largest element (at least 1)."""


class Work(NamedTuple):
    """A model, what it is called with, and whether a step of training is timed (in eval mode: no dropout)."""

    make: Callable[[], Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    trains: bool = False
    dtype: torch.dtype = torch.float32


def _of(kind: str, head: str = "Model", **config: Any) -> Callable[[], Any]:
    """A class of transformers, made from its configuration."""

    def make() -> Any:
        import transformers

        made = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**config))
        return made.encoder if kind == "Whisper" else made

    return make


def _ids(rows: int, tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(5, 20000, (rows, tokens)),)


def _images(rows: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(rows, 3, 224, 224),)


class Sentences(nn.Module):
    """Embeddings of sentences, as sentence-transformers makes them: the mean of a sentence's tokens."""

    def __init__(self) -> None:
        super().__init__()
        about: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
        self.encoder = _of("Bert", num_hidden_layers=6, **about)()

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor]:
        tokens = self.encoder(ids, attention_mask=mask).last_hidden_state
        real = mask.unsqueeze(-1).to(tokens.dtype)
        return (functional.normalize((tokens * real).sum(1) / real.sum(1).clamp(min=1e-9)),)


def _padded(rows: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(least, most + 1, (rows,))
    lengths[0] = most
    return torch.randint(5, 20000, (rows, most)), (torch.arange(most) < lengths[:, None]).long()


class UNetBlock(nn.Module):
    """A block of Stable Diffusion's UNet: attention among 64 x 64 places, to 77 words, and a gated layer."""

    def __init__(self, width: int = 320, heads: int = 8, words: int = 768) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.to_q = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.to_k = nn.ModuleList(nn.Linear(n, width, bias=False) for n in (width, words))
        self.to_v = nn.ModuleList(nn.Linear(n, width, bias=False) for n in (width, words))
        self.to_out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor]:
        for place in range(2):
            normal = self.norms[place](x)
            given = (normal, words)[place]
            pairs = (self.to_q, normal), (self.to_k, given), (self.to_v, given)
            q, k, v = (to[place](y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to, y in pairs)
            found = functional.scaled_dot_product_attention(q, k, v)
            x = x + self.to_out[place](found.transpose(1, 2).flatten(2))
        value, gate = self.up(self.norms[2](x)).chunk(2, -1)
        return (x + self.down(value * functional.gelu(gate)),)


class Translated(nn.Module):
    """Whisper's decoder: a few tokens, beside what its encoder gave."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.WhisperConfig(encoder_layers=1, decoder_layers=4)
        self.decoder = transformers.WhisperModel(config).decoder

    def forward(self, ids: Tensor, sound: Tensor) -> Any:
        return self.decoder(input_ids=ids, encoder_hidden_states=sound, use_cache=False)


_BERT = _of("Bert", num_hidden_layers=6)
_GPT2 = _of("GPT2", "LMHeadModel", n_layer=6, use_cache=False)
_LLAMA = _of(
    "Llama", "ForCausalLM", hidden_size=512, intermediate_size=1408, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=4, vocab_size=20000, use_cache=False,
)  # fmt: skip
WORKS: Mapping[str, Work] = {
    "BERT 8 x 128": Work(_BERT, _ids(8, 128)), "BERT 4 x 512": Work(_BERT, _ids(4, 512)),
    "ViT 8 x 224": Work(_of("ViT", num_hidden_layers=6), _images(8)),
    "Swin 4 x 224": Work(_of("Swin", depths=[2, 2, 2, 2]), _images(4)),
    "T5 encoder 4 x 512": Work(_of("T5", "EncoderModel", num_layers=6), _ids(4, 512)),
    "Whisper encoder 3000": Work(
        _of("Whisper", encoder_layers=4, decoder_layers=1), lambda: (torch.randn(1, 80, 3000),)
    ),
    "Whisper decoder 1 x 1": Work(Translated, lambda: (_ids(1, 1)()[0], torch.randn(1, 1500, 384))),
    "MiniLM 64 x 5 to 120": Work(Sentences, lambda: _padded(64, 5, 120)),
    "UNet block 2 x 4096": Work(UNetBlock, lambda: (torch.randn(2, 4096, 320), torch.randn(2, 77, 768))),
    "Mamba-2 1 x 1024": Work(functools.partial(models.mamba2, layers=6), _ids(1, 1024)),
    "GPT-2 1 x 128": Work(_GPT2, _ids(1, 128)), "GPT-2 1 x 1024": Work(_GPT2, _ids(1, 1024)),
    "Llama 1 x 128": Work(_LLAMA, _ids(1, 128)), "Llama 2 x 512": Work(_LLAMA, _ids(2, 512)),
    "GPT-2 bfloat16 1 x 1024": Work(_GPT2, _ids(1, 1024), dtype=torch.bfloat16),
    "GPT-2 train 2 x 512": Work(_GPT2, _ids(2, 512), trains=True),
    "Llama train 2 x 1024": Work(_LLAMA, _ids(2, 1024), trains=True),
    "BERT train 8 x 128": Work(_BERT, _ids(8, 128), trains=True),
    "DeiT train 8 x 224": Work(
        _of("DeiT", num_hidden_layers=6, hidden_size=384, intermediate_size=1536, num_attention_heads=6),
        _images(8), trains=True,
    ),
}  # fmt: skip
SMALL: Mapping[str, Work] = {
    "tiny BERT": Work(_of("Bert", num_hidden_layers=1, hidden_size=64, num_attention_heads=2), _ids(2, 16)),
    "tiny BERT train": Work(
        _of("Bert", num_hidden_layers=1, hidden_size=64, num_attention_heads=2), _ids(2, 16), trains=True
    ),
}


# --- the process of a candidate ---


def serve(name: str, cell: str, threads: int, pipe: Connection) -> None:
    """Make the candidate, answer with its first result, then time calls until it is told to end."""
    torch.set_num_threads(threads)
    made: _Made | None = None
    while True:
        try:
            asked, *args = pipe.recv()
        except EOFError:
            return  # nobody asks any more
        try:
            if asked == "make":
                made = _Made(name, {**WORKS, **SMALL}[cell])
                pipe.send((made.first, made.seconds))
            else:
                assert made is not None
                pipe.send([made.timed() for _ in range(*args)])
        except Exception as problem:
            pipe.send(Failure(short(problem, 300)))


class _Made:
    def __init__(self, name: str, work: Work) -> None:
        self.work, self.model = work, models.made(work.make).to(work.dtype)
        torch.manual_seed(0)
        self.inputs = tuple(x.to(work.dtype) if x.is_floating_point() else x for x in work.inputs())
        start = time.perf_counter()
        self.call = _candidate(name, self.model, self.inputs)
        self.first = self.run().detach()
        for _ in range(6):  # attngraph finds out which is faster in the first calls of a size
            self.run()
        self.seconds = time.perf_counter() - start

    def run(self) -> Tensor:
        with torch.set_grad_enabled(self.work.trains):
            found: Tensor = self.call(*self.inputs)[0]
            if self.work.trains:
                self.model.zero_grad(set_to_none=True)
                torch.autograd.backward(found.square().mean())
        return found

    def timed(self) -> float:
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


def _serves(name: str, work: Work) -> bool:
    """Whether a candidate has this cell. OpenVINO would compute bfloat16 in float32, and onnxruntime has few
    of its operations."""
    missing = [package for package in KEEPING.get(name, ()) if installed(package) is None]
    of_16_bits = name in (OPENVINO, ONNX) and work.dtype != torch.float32
    return not missing and not of_16_bits and not (work.trains and name in KEEPING)


def _candidate(name: str, model: Any, inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
    found: Callable[..., Any] = model
    if name == EAGER:
        return found
    if name in (OURS, OURS_FROZEN):
        import attngraph

        found = attngraph.compile(model, freeze=name == OURS_FROZEN)
        return found
    if name in (OPENVINO, ONNX):
        with torch.no_grad():
            return (whole_openvino if name == OPENVINO else whole_onnxruntime)(model, inputs)
    if name == FROZEN:
        from torch._inductor import config

        config.freezing = True
    found = torch.compile(model)
    return found


# --- the run ---


def measured(cell: str, work: Work, rounds: int) -> dict[str, Row]:
    """The medians of one cell, or reasons for none, and the floor."""
    names = [n for n in CANDIDATES if _serves(n, work)]
    workers = {n: Server(serve, n, cell, torch.get_num_threads()) for n in names}
    found: dict[str, Row] = {}
    eager: Tensor | None = None
    try:
        for name, worker in workers.items():
            answer = ask(worker, "make")
            if isinstance(answer, Failure):
                found[name] = {"problem": str(answer)}
                continue
            first, seconds = answer
            eager = first if eager is None else eager
            off = float((first - eager).abs().max()) / max(1.0, float(eager.abs().max()))
            told = {"first": seconds, "differs": off}
            found[name] = (
                told if off <= CLOSE[work.dtype] else {"problem": f"differs from eager by {off:.1e}"}
            )
        seconds_of: dict[str, list[float]] = {n: [] for n, row in found.items() if "problem" not in row}
        speeds = []
        for _ in range(rounds):
            speeds.append(_product_speed())
            for name, spent in seconds_of.items():
                answer = ask(workers[name], "time", 2)
                spent += [] if isinstance(answer, Failure) else answer
        for name, spent in seconds_of.items():
            found[name]["seconds"] = statistics.median(spent)
        flops = _flops(work)
        found["floor"] = {"seconds": flops / max(speeds), "gflops": max(speeds) / 1e9}
    finally:
        for worker in workers.values():
            worker.close()
    return found


@functools.cache
def _flops(work: Work) -> float:
    """What products of the call compute; a step of training has three times as many."""
    model, inputs = models.made(work.make), work.inputs()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    return float(counter.get_total_flops()) * (3 if work.trains else 1)


def _product_speed(size: int = 1024) -> float:
    """Floating operations of a second in a product of square matrices."""
    a, b = torch.randn(2, size, size)
    a @ b
    start = time.perf_counter()
    a @ b
    return 2 * size**3 / (time.perf_counter() - start)


def cells(options: Options) -> Iterator[Cell]:
    rounds = 2 if options.small else 7
    for name, work in (SMALL if options.small else WORKS).items():
        yield Cell(name, functools.partial(measured, name, work, rounds))


def lost(_: Options, rows: Sequence[Row]) -> str:
    """The cells in which another candidate is faster: among those for which weights may change, and among
    those that keep them as they were."""
    told = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        found = {r["name"]: 1e3 * r["seconds"] for r in rows if r["cell"] == cell and "seconds" in r}
        for name, beside in ((OURS, (EAGER, COMPILE)), (OURS_FROZEN, (FROZEN, OPENVINO, ONNX))):
            others = {n: found[n] for n in beside if n in found}
            best, ours = min(others, key=others.__getitem__, default=""), found.get(name)
            if ours is None and name == OURS:
                told.append(f"LOST: {cell}: attngraph has no figure.")
            elif ours is not None and best and ours > NOISE * others[best]:
                beside_best = f"{best} {others[best]:.0f} ms ({ours / others[best]:.2f} times as long)"
                told.append(f"LOST: {cell}: {name} {ours:.0f} ms, {beside_best}.")
    return "\n".join(told) or "attngraph lost no cell."


MAIN = Suite("whole", __doc__, cells, base=OURS, after=lost, gradients=True).main
