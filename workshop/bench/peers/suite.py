"""Whole models on the CPU beside the engines that users could pick instead.

    python -m workshop peers --json peers.json --plot peers.png           (pip install ".[peers]")

GPT-2 and a Llama of 100M with random weights in float32: a prompt at once, and one token of each row over a
filled cache. Every candidate has a process of its own, because what one keeps in memory slows others down,
and all processes take turns, round after round, because the speed of a machine drifts. Before a cell is timed
its answers are compared with eager's. The floor of a token is the time that reading the weights takes at the
bandwidth measured in the same minute. The candidates are in `torch_ways` and `engines`, the reading in
`bandwidth`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workshop.bench import models
from workshop.bench.peers.bandwidth import SIZE, Memory
from workshop.harness import Cell, Options, Row, Suite, installed, short
from workshop.processes import Ended, Server

MODELS: Mapping[str, Callable[[], Any]] = {
    "GPT-2": functools.partial(models.gpt2, 1152), "Llama 100M": models.llama,
    "tiny Llama": models.tiny_llama,
}  # fmt: skip
CANDIDATES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "eager": ("torch_ways", "Eager", ()),
    "torch.compile": ("torch_ways", "Compiled", ()),
    "zentorch": ("torch_ways", "Zen", ("zentorch",)),
    "OpenVINO": ("engines", "OpenVINOState", ("openvino",)),
    "OpenVINO, past as input": ("engines", "OpenVINOPast", ("openvino",)),
    "onnxruntime": ("engines", "OnnxRuntime", ("onnxruntime", "onnx", "onnxscript")),
    "attngraph": ("torch_ways", "Ours", ()),
    "attngraph, frozen": ("torch_ways", "Frozen", ()),
}
"""Where each candidate is, and the packages that it needs."""
OURS, NOISE = ("attngraph", "attngraph, frozen"), 1.03
"""A cell is lost where the best of the others is faster by more than this."""
CLOSE = 1e-3
"""The largest accepted difference of logits from eager's, relative to the largest logit (at least 1)."""
LIMIT = 900.0
"""Seconds that one answer of a process may take."""
CHUNK = 128
"""Tokens of a row that fill a cache at a time: logits of all of them at once would take gigabytes."""
COMPARED = 8
"""The last tokens of a prompt whose logits are compared."""


class Candidate(Protocol):
    """A way to run a model with a cache of its own. Made from the model; that is the time it needs to compile
    or convert, as far as it does not wait for the first calls."""

    def begin(self, rows: int, room: int) -> None:
        """Have an empty cache of so many rows, each with room for so many tokens."""

    def advance(self, ids: Tensor) -> Tensor:
        """The logits `[B, S, V]` of the next tokens `[B, S]` of every row, which the cache then holds."""

    def rewind(self, kept: int) -> None:
        """Forget all but the first tokens of each row."""


@dataclass(frozen=True)
class Work:
    """`kept` is None for a whole prompt of `new` tokens, else how many tokens each row has in its cache."""

    model: str
    rows: int
    new: int
    kept: int | None = None

    def __str__(self) -> str:
        if self.kept is None:
            return f"{self.model}, prompt of {self.new}"
        return f"{self.model}, token, {self.kept} kept, batch {self.rows}"

    @property
    def calls(self) -> tuple[int, int]:
        """Calls in one turn: before timing, and timed."""
        return (1, 2) if self.kept is None else (3, 10)

    @property
    def room(self) -> int:
        """The most tokens that a row has in its cache."""
        return self.new if self.kept is None else self.kept + sum(self.calls)

    def ids(self, vocabulary: int) -> Tensor:
        """Tokens to begin with, and those that follow: `[rows, room]`."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocabulary, (self.rows, self.room), generator=generator)


def works_of(model: str, is_small: bool) -> list[Work]:
    """What is measured of a model; a small run has one of each kind."""
    if is_small:
        return [Work(model, 1, 16), Work(model, 2, 1, 16)]
    prompts = [Work(model, 1, new) for new in (128, 1024)]
    return prompts + [Work(model, rows, 1, kept) for rows in (1, 8) for kept in (128, 1024)]


# --- the process of a candidate ---


class Failure(str):
    """Why a candidate gives no figure."""


def serve(name: str, model: str, threads: int, pipe: Connection) -> None:
    """What the process does until it is told to end; an answer is a result or the text of a failure."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        made: _Made | None = None
        while True:
            asked, *args = pipe.recv()
            try:
                if asked == "make":
                    made = _Made(name, model)
                    pipe.send(made.seconds)
                    continue
                assert made is not None
                pipe.send(made.answer(*args) if asked == "answer" else made.time(*args))
            except Exception as problem:
                pipe.send(Failure(short(problem, 300)))


class _Made:
    def __init__(self, name: str, model: str) -> None:
        file, of, _ = CANDIDATES[name]
        self.vocabulary = (whole := models.made(MODELS[model])).config.vocab_size
        made = getattr(importlib.import_module(f"workshop.bench.peers.{file}"), of)
        start = time.perf_counter()
        self.candidate: Candidate = made(whole)
        self.seconds = time.perf_counter() - start
        self.ids = torch.empty(0)

    def answer(self, work: Work) -> tuple[Tensor, float]:
        """Get ready for a cell: the logits that are compared, and the seconds that this took, in which a way
        that compiles for the sizes of a call does so."""
        start = time.perf_counter()
        self.ids = work.ids(self.vocabulary)
        if work.kept is not None:
            self.candidate.begin(work.rows, work.room)
            for part in torch.split(self.ids[:, : work.kept], CHUNK, 1):
                self.candidate.advance(part)
        logits = self._call(work, 0).clone()
        return logits[:, -COMPARED:], time.perf_counter() - start

    def time(self, work: Work) -> list[float]:
        """Seconds of each timed call of one turn."""
        if work.kept is not None:
            self.candidate.rewind(work.kept)
        before, count = work.calls
        seconds = []
        for number in range(before + count):
            start = time.perf_counter()
            self._call(work, number)
            seconds.append(time.perf_counter() - start)
        return seconds[before:]

    def _call(self, work: Work, number: int) -> Tensor:
        if work.kept is None:
            self.candidate.begin(work.rows, work.room)
            return self.candidate.advance(self.ids)
        at = work.kept + number
        return self.candidate.advance(self.ids[:, at : at + 1])


def ask(worker: Server, *what: Any) -> Any:
    """The answer, or a `Failure`."""
    try:
        return worker.ask(*what, limit=LIMIT)
    except Ended as problem:
        return Failure(problem)


def missing(name: str) -> str:
    """Which package a candidate lacks here; empty if none."""
    lacks = [package for package in CANDIDATES[name][2] if installed(package) is None]
    return f"{lacks[0]} is not installed" if lacks else ""


# --- the run ---


class Run:
    """The candidates of a model, each made in its process when the first cell is measured."""

    def __init__(self, model: str, names: Sequence[str], memory: Callable[[], Memory]) -> None:
        self.model, self.names, self.memory = model, names, memory
        self.workers: dict[str, Server] = {}

    @functools.cached_property
    def made(self) -> dict[str, Row]:
        """Seconds of compiling or converting, or why a candidate is left out."""
        found: dict[str, Row] = {}
        for name in self.names:
            answer: Any = Failure(reason) if (reason := missing(name)) else None
            if answer is None:
                self.workers[name] = Server(serve, name, self.model, torch.get_num_threads())
                answer = ask(self.workers[name], "make")
                if isinstance(answer, Failure):
                    self.workers.pop(name).close()
            is_made = not isinstance(answer, Failure)
            found[name] = {"seconds": answer} if is_made else {"problem": f"left out: {answer}"}
        return found

    @functools.cached_property
    def bytes(self) -> int:
        return bytes_of_weights(models.made(MODELS[self.model]))

    def measured(self, work: Work, rounds: int) -> dict[str, Row]:
        """The medians of one cell, differences from eager, or reasons for none."""
        found: dict[str, Row] = {}
        eager: Tensor | None = None
        for name in (n for n, row in self.made.items() if "problem" not in row):
            answer = ask(self.workers[name], "answer", work)
            if isinstance(answer, Failure):
                found[name] = {"problem": str(answer)}
                continue
            logits, first = answer
            eager = logits if eager is None else eager
            off = float((logits - eager).abs().max()) / max(1.0, float(eager.abs().max()))
            found[name] = {"first": first, "differs": off}
            if not off <= CLOSE:  # a NaN is no answer either
                found[name] = {"problem": f"its logits differ from eager's by {off:.1e} of the largest"}
        seconds: dict[str, list[float]] = {n: [] for n, row in found.items() if "problem" not in row}
        bandwidth: list[float] = []
        for _ in range(rounds):
            bandwidth.append(self.memory().bandwidth())
            for name in list(seconds):
                answer = ask(self.workers[name], "time", work)
                if isinstance(answer, Failure):
                    del seconds[name]
                    found[name] = {"problem": str(answer)}
                else:
                    seconds[name] += answer
        for name, spent in seconds.items():
            found[name]["seconds"] = statistics.median(spent)
        if work.kept is not None:  # a prompt reads the weights for many tokens
            speed = statistics.median(bandwidth)
            found["floor"] = {"seconds": self.bytes / speed, "gbytes": speed / 1e9}
        return found

    def end(self) -> None:
        for worker in self.workers.values():
            worker.close()


def bytes_of_weights(model: nn.Module) -> int:
    """Bytes that a token has to read: all weights but tables of which it looks up a row."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(p.nbytes for p in model.parameters() if id(p) not in tables)


def cells(options: Options) -> Iterator[Cell]:
    names = [n for n in CANDIDATES if n not in options.without]
    memory = functools.cache(lambda: Memory(SIZE >> 5 if options.small else SIZE))
    for model in options.models or (["tiny Llama"] if options.small else ["GPT-2", "Llama 100M"]):
        run = Run(model, names, memory)
        try:
            yield Cell(f"{model}, compiling or converting", lambda run=run: run.made)  # type: ignore[misc]
            for work in works_of(model, options.small):
                rounds = options.rounds or (2 if options.small else 7)
                yield Cell(str(work), functools.partial(run.measured, work, rounds))
        finally:
            run.end()


def lost(_: Options, rows: Sequence[Row]) -> str:
    """The cells in which another candidate is faster, or attngraph has no figure."""
    told = []
    for cell in dict.fromkeys(row["cell"] for row in rows if "compiling" not in row["cell"]):
        found = {
            row["name"]: row["seconds"] * 1e3 for row in rows if row["cell"] == cell and "seconds" in row
        }
        given = {row["name"] for row in rows if row["cell"] == cell} | {OURS[0]}
        ours = {name: found.pop(name, None) for name in OURS if name in given}
        others = {name: spent for name, spent in found.items() if name != "floor"}
        best = min(others, key=others.__getitem__, default="")
        for name, spent in ours.items():
            if spent is None:
                told.append(f"LOST: {cell}: {name} has no figure.")
            elif best and spent > NOISE * others[best]:
                told.append(
                    f"LOST: {cell}: {name} takes {spent:.1f} ms, {best} {others[best]:.1f} ms "
                    f"({spent / others[best]:.2f} times as long)."
                )
    return "\n".join(told) or "attngraph lost no cell."


def versions(options: Options) -> Row:
    """The versions of the packages that are installed."""
    packages = ("torch", "transformers", *sorted({p for *_, needs in CANDIDATES.values() for p in needs}))
    return {"packages": {package: found for package in packages if (found := installed(package)) is not None}}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--without", nargs="+", default=[], choices=sorted(CANDIDATES), metavar="NAME")
    parser.add_argument("--rounds", type=int, help="turns of each candidate in each cell (default: 7)")


MAIN = Suite("peers", __doc__, cells, _arguments, versions, base=OURS[0], after=lost).main
