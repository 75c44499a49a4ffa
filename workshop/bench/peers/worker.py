"""The process of one candidate, and the end of it that the run holds.

The process makes the model, then does what it is told: get a cell ready and answer, time some calls.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from workshop.bench.peers.cells import Candidate, Cell
from workshop.bench.peers.models import make

CANDIDATES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "eager": ("torch_ways", "Eager", ()),
    "torch.compile": ("torch_ways", "Compiled", ()),
    "zentorch": ("torch_ways", "Zen", ("zentorch",)),
    "OpenVINO": ("engines", "OpenVINOState", ("openvino",)),
    "OpenVINO, past as input": ("engines", "OpenVINOPast", ("openvino",)),
    "onnxruntime": ("engines", "OnnxRuntime", ("onnxruntime", "onnx", "onnxscript")),
    "attngraph": ("torch_ways", "Ours", ()),
}
"""Where each candidate is, and the packages that it needs."""
CHUNK = 128
"""Tokens of a row that fill a cache at a time: logits of all of them at once would take gigabytes."""
COMPARED = 8
"""The last tokens of a prompt whose logits are compared."""


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
                pipe.send(Failure(f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"))


class Failure(str):
    """Why a candidate gives no figure."""


class _Made:
    def __init__(self, name: str, model: str) -> None:
        file, of, _ = CANDIDATES[name]
        self.vocabulary = (whole := make(model)).config.vocab_size
        made = getattr(importlib.import_module(f"workshop.bench.peers.{file}"), of)
        start = time.perf_counter()
        self.candidate: Candidate = made(whole)
        self.seconds = time.perf_counter() - start
        self.ids = torch.empty(0)

    def answer(self, cell: Cell) -> tuple[Tensor, float]:
        """Get ready for a cell: the logits that are compared, and the seconds that this took, in which a way
        that compiles for the sizes of a call does so."""
        start = time.perf_counter()
        self.ids = cell.ids(self.vocabulary)
        if cell.kept is not None:
            self.candidate.begin(cell.rows, cell.room)
            for part in torch.split(self.ids[:, : cell.kept], CHUNK, 1):
                self.candidate.advance(part)
        logits = self._call(cell, 0).clone()
        return logits[:, -COMPARED:], time.perf_counter() - start

    def time(self, cell: Cell) -> list[float]:
        """Seconds of each timed call of one turn."""
        if cell.kept is not None:
            self.candidate.rewind(cell.kept)
        before, count = cell.calls
        seconds = []
        for number in range(before + count):
            start = time.perf_counter()
            self._call(cell, number)
            seconds.append(time.perf_counter() - start)
        return seconds[before:]

    def _call(self, cell: Cell, number: int) -> Tensor:
        if cell.kept is None:
            self.candidate.begin(cell.rows, cell.room)
            return self.candidate.advance(self.ids)
        at = cell.kept + number
        return self.candidate.advance(self.ids[:, at : at + 1])


class Worker:
    """A candidate in its process."""

    def __init__(self, name: str, model: str, limit: float) -> None:
        self.name, self.limit = name, limit
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (name, model, torch.get_num_threads(), theirs)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *what: Any) -> Any:
        """The answer to a command, or a `Failure`."""
        try:
            self._pipe.send(what)
            if self._pipe.poll(self.limit):
                return self._pipe.recv()
            return Failure(f"no answer in {self.limit:.0f} s")
        except (EOFError, OSError):
            self._process.join(5)
            return Failure(f"its process ended with {self._process.exitcode}")

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def missing(name: str) -> str:
    """Which package a candidate lacks here; empty if none."""
    for package in CANDIDATES[name][2]:
        try:
            found = importlib.util.find_spec(package)
        except ValueError:
            found = None
        if found is None:
            return f"{package} is not installed"
    return ""
