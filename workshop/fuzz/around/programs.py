"""Models that read a number from somewhere, compiled in several ways, before and after it changes there."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import random
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attngraph
from attngraph.errors import AttnGraphError
from workshop.fuzz.around.places import SOURCES, WRAPPERS, Source, Wrapper

KINDS = ("module", "default", "function", "decoder", "saved", "cached", "pieces", "thread")

_FILE = """
import collections, contextvars, dataclasses, functools, os, sys, threading, types, weakref
import torch
from torch import nn
import theirs as other
{setup}
class Model({bases}):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(13, 8), nn.Linear(8, 13)
{made}
{methods}
    def attend(self, x):
        s = x @ x.mT / 3
        p = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        return (p @ x) * ({use})
    def forward(self, x):
        {breaks}
        return self.h(self.attend(self.e(x)))
{after}
def change(m, v):
{change}
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """One program; `text` is its file."""

    source: Source
    wrapper: Wrapper
    kind: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.source.name} / {self.wrapper.name} / {self.kind} {self.values}"

    @property
    def text(self) -> str:
        source, wrapper = self.source, self.wrapper

        def of(text: str, depth: int = 0) -> str:
            lines = text.replace("READ", f"({source.read})").splitlines()
            return "\n".join(" " * depth + line for line in lines)

        changes = (line for part in source.change.split("; ") for line in part.splitlines())
        breaks = "torch._dynamo.graph_break() if x.sum() > 1000 else None"
        return _FILE.format(
            setup=f"{source.setup}\n{of(wrapper.setup)}", made=f"{of(source.made, 8)}\n{of(wrapper.made, 8)}",
            bases="Mixin, nn.Module" if wrapper.name == "inherited" else "nn.Module",
            methods=of(wrapper.methods, 4), use=of(wrapper.use), after=wrapper.after,
            change="\n".join("    " + line for line in changes),
            breaks=breaks if self.kind == "pieces" else "pass",
        )  # fmt: skip


def programs(seed: int) -> Iterator[Program]:
    """Programs without end, in random order: first every source with every wrapper."""
    chosen = random.Random(seed)
    pairs = list(itertools.product(SOURCES, WRAPPERS))
    while True:
        chosen.shuffle(pairs)
        for source, wrapper in pairs:
            kind = chosen.choice(KINDS)
            values = chosen.choice(((3.0, 2.0), (2.0, 3.0), (3.0, 3.0, 2.0), (3.0, 2.0, 3.0)))
            yield Program(source, wrapper, kind, values)


def check(program: Program, folder: Path) -> str:
    """What is wrong with one program; "" if every answer is eager's, or was refused."""
    sys.modules["theirs"] = types.ModuleType("theirs")
    path = folder / "around_program.py"
    path.write_text(program.text)
    about = importlib.util.spec_from_file_location("around_program", path)
    assert about is not None and about.loader is not None
    file = importlib.util.module_from_spec(about)
    sys.modules["around_program"] = file
    dtype = torch.get_default_dtype()
    try:
        torch.manual_seed(0)
        about.loader.exec_module(file)
        return _check(program, file, folder)
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)
        for name in ("ATTN_N", "ATTN_K"):
            os.environ.pop(name, None)


def _check(program: Program, file: types.ModuleType, folder: Path) -> str:
    model = file.Model()
    if program.source.name != "training":
        model.eval()
    ids = torch.randint(0, 13, (2, 7))
    with torch.no_grad():
        call = _compiled(program.kind, model, ids, folder)
    for place, value in enumerate((None, *program.values)):
        if value is not None:
            _change(program, file, model, value)
        with torch.no_grad():
            want = model(ids)
            try:
                found = call(ids)
            except AttnGraphError as problem:
                if program.kind == "decoder":
                    continue  # a decoder may say that there is none
                return f"call {place}: {type(problem).__name__}: {problem}"
        if found.shape != want.shape or not torch.allclose(found.to(want.dtype), want, atol=1e-4):
            return f"call {place} is wrong by {(found.to(want.dtype) - want).abs().max():.3g}"
    return ""


def _change(program: Program, file: types.ModuleType, model: Any, value: float) -> None:
    if program.kind == "thread" and program.source.name not in ("context variable", "thread's own"):
        thread = threading.Thread(target=file.change, args=(model, value))
        thread.start()
        thread.join()
    else:
        file.change(model, value)


def _compiled(kind: str, model: Any, ids: Tensor, folder: Path) -> Any:
    """What is compiled, as a function of tokens."""
    compiled: Any = attngraph.compile(model, min_scores=0)
    match kind:
        case "decoder":
            decoder = attngraph.compile(model, cache=True)
            return lambda ids: decoder.prefill(ids)[0]
        case "function":
            return attngraph.compile(lambda ids: model(ids), min_scores=0)
        case "default":
            return attngraph.compile(model)
        case "cached":
            compiled(ids)
            return lambda ids: attngraph.compile(model, min_scores=0)(ids)
        case "saved":
            try:
                compiled(ids)
                compiled.save(folder / "saved")
            except AttnGraphError:
                return compiled  # a model in pieces has no form in files
            return attngraph.load(folder / "saved", model)
    return compiled
