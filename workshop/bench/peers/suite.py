"""The run: makes the candidates of a model, compares their answers, and times them in turn."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workshop.bench.peers import table
from workshop.bench.peers.bandwidth import SIZE, Memory
from workshop.bench.peers.cells import Cell, cells_of
from workshop.bench.peers.models import bytes_of_weights, make
from workshop.bench.peers.worker import CANDIDATES, Failure, Worker, missing

CLOSE = 1e-3
"""The largest accepted difference of logits from eager's, relative to the largest logit (at least 1)."""
LIMIT = 900.0
"""Seconds that one command to a process may take."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workshop bench --suite peers")
    parser.add_argument("--models", nargs="+", choices=("GPT-2", "Llama 100M", "tiny Llama"))
    parser.add_argument("--without", nargs="+", default=[], choices=sorted(CANDIDATES), metavar="NAME")
    parser.add_argument("--rounds", type=int, help="turns of each candidate in each cell (default: 7)")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    models = options.models or (["tiny Llama"] if options.small else ["GPT-2", "Llama 100M"])
    rounds = options.rounds or (2 if options.small else 7)
    names = [n for n in CANDIDATES if n not in options.without]
    results: dict[str, Any] = {"machine": machine(), "packages": versions(), "models": {}}
    memory = Memory(SIZE >> 5 if options.small else SIZE)
    for model in models:
        results["models"][model] = measured(model, cells_of(model, options.small), names, rounds, memory)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(table.text(results))
    return 0


def measured(
    model: str, cells: Sequence[Cell], names: Sequence[str], rounds: int, memory: Memory
) -> dict[str, Any]:
    """The figures of a model: seconds of making each candidate, and of each cell."""
    found: dict[str, Any] = {"bytes": bytes_of_weights(make(model)), "made": {}, "left out": {}, "cells": {}}
    workers: dict[str, Worker] = {}
    try:
        for name in names:
            reason = missing(name)
            if not reason:
                _say(f"{model}: {name} is made")
                workers[name] = Worker(name, model, LIMIT)
                answer = workers[name].ask("make")
                reason = answer if isinstance(answer, Failure) else ""
                found["made"] |= {} if reason else {name: answer}
            if reason:
                found["left out"][name] = str(reason)
                if name in workers:
                    workers.pop(name).end()
        for cell in cells:
            found["cells"][str(cell)] = _cell(cell, workers, rounds, memory)
    finally:
        for worker in workers.values():
            worker.end()
    return found


def _cell(cell: Cell, workers: dict[str, Worker], rounds: int, memory: Memory) -> dict[str, Any]:
    """The figures of one cell: seconds of every timed call, differences from eager, reasons for none."""
    problems: dict[str, str] = {}
    differences: dict[str, float] = {}
    first: dict[str, float] = {}
    eager: Tensor | None = None
    for name, worker in workers.items():
        _say(f"{cell}: {name} answers")
        answer = worker.ask("answer", cell)
        if isinstance(answer, Failure):
            problems[name] = str(answer)
            continue
        logits, first[name] = answer
        eager = logits if eager is None else eager
        scale = max(1.0, float(eager.abs().max()))
        differences[name] = float((logits - eager).abs().max()) / scale
        if not differences[name] <= CLOSE:  # a NaN is no answer either
            problems[name] = f"its logits differ from eager's by {differences[name]:.1e} of the largest"
    seconds: dict[str, list[float]] = {n: [] for n in workers if n not in problems}
    bandwidth: list[float] = []
    for turn in range(rounds):
        _say(f"{cell}: turn {turn + 1} of {rounds}")
        bandwidth.append(memory.bandwidth())
        for name in list(seconds):
            answer = workers[name].ask("time", cell)
            if isinstance(answer, Failure):
                problems[name] = str(answer)
                del seconds[name]
            else:
                seconds[name] += answer
    return {
        "kept": cell.kept, "rows": cell.rows, "new": cell.new, "seconds": seconds, "first": first,
        "differences": differences, "problems": problems, "bandwidth": bandwidth,
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """The processor and what it can do, as far as it matters here."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    told = {name.strip(): value.strip() for name, value in fields.items()}
    wanted = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimd", "sve")
    flags = set((told.get("flags") or told.get("Features") or "").split())
    return {
        "processor": told.get("model name") or platform.processor() or platform.machine(),
        "features": [f for f in wanted if f in flags], "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    packages = ("torch", "transformers", *sorted({p for *_, needs in CANDIDATES.values() for p in needs}))
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)
