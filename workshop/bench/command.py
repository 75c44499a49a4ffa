"""`python -m workshop bench`: attention compared with other implementations and with the machine's limits."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attngraph.cli import demo
from attngraph.cli.arguments import parser
from attngraph.cli.terminal import Progress, TargetError, check_writable
from attngraph.codegen.triton import store
from workshop.arguments import OTHER_SUITES
from workshop.bench import attention_cpu, decoding, gpu, gpu_run, latent, peers, states
from workshop.bench.plot import Bars, draw, formats
from workshop.bench.scorecard import show

_ON_A_GPU = ("only", "without", "minutes", "resume", "tune")


def run(options: argparse.Namespace) -> int:
    """Measure suites. GPUs and CPUs have different benchmarks, since they are used for different tasks."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.suite != ["scorecard"]:
        _check(options)
    if "gpu" in options.suite:
        return _run_on_a_gpu(options)
    codes = []
    if "scorecard" in options.suite:
        codes.append(show.show(options, _own(options.json, "scorecard", options) if options.json else None))
    codes += [_measure_models(options)] if "models" in options.suite else []
    for name in (name for name in ("peers", "states") if name in options.suite):
        _measure_cpu(name, options, ["--small"] if options.small else [])
    suites = [name for name in options.suite if name not in OTHER_SUITES]
    if options.device == "cpu" and not options.small:
        for name in suites:
            _measure_cpu(name, options)
    elif suites:
        _measure_cells(suites, options)
    return max(codes, default=0)


def _check(options: argparse.Namespace) -> None:
    """Refuse, before anything is measured, what cannot be done.

    Raises:
        TargetError: says why not.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise TargetError("--device cuda: PyTorch finds no GPU here; --device cpu measures this machine.")
    check_writable(options.json, "--json")
    check_writable(options.plot, "--plot")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise TargetError('--plot needs matplotlib: pip install "attngraph[plot]"')
    if options.plot and options.plot.suffix.removeprefix(".").lower() not in formats():
        raise TargetError(f"--plot: {options.plot}: the name of a picture may end in {', '.join(formats())}.")
    given = [name for name in _ON_A_GPU if getattr(options, name) not in ([], False, math.inf)]
    if given and options.device == "cpu" and not options.small:
        raise TargetError(
            f"--{given[0]} is for a run on a GPU, or with --small. On the CPU, "
            "python -m workshop.bench.attention_cpu --help lists what can be chosen."
        )


def _measure_cells(suites: Sequence[str], options: argparse.Namespace) -> None:
    """The suites cell by cell: on a GPU, or tiny."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    tell, known = Progress(), _known(options)

    def keep(about: dict[str, Any], rows: list[gpu.Row]) -> None:
        if options.json:
            found = {**about, "rows": [asdict(row) for row in (*known, *rows)]}
            store.write(options.json, json.dumps(found, indent=2) + "\n")

    part = gpu.Part(
        options.only, options.without, frozenset(row.cell for row in known),
        time.monotonic() + 60 * options.minutes, options.tune,
    )  # fmt: skip
    about, rows = gpu.run(suites, options.device, dtype, options.small, tell, part, keep)
    tell.done()
    rows = [*known, *rows]
    if not rows and options.only:
        raise TargetError(
            f"--only {' '.join(options.only)}: no cell of these suites has all of that in its name."
        )
    keep(about, rows[len(known) :])
    print(gpu.table(about, rows))
    if options.plot:
        _draw(gpu.bars(about, rows), options.plot)


def _run_on_a_gpu(options: argparse.Namespace) -> int:
    """Check, measure and tune within the time; 1 if a kernel gives wrong answers."""
    if len(options.suite) > 1:
        raise TargetError("--suite gpu is a run of its own.")
    if options.device == "cpu" and not options.small:
        raise TargetError(
            "--suite gpu needs a GPU; with --small and TRITON_INTERPRET=1 a dry run needs none."
        )
    minutes = gpu_run.MINUTES if math.isinf(options.minutes) else options.minutes
    tell = Progress()
    found = gpu_run.run(
        options.device, options.small, minutes, options.json, options.resume, options.only, tell
    )
    tell.done()
    print(gpu_run.table(found))
    return int(not gpu_run.is_right(found))


def _measure_models(options: argparse.Namespace) -> int:
    """What `attngraph demo` does, with its results in a file; tiny models once round under --small."""
    plain = parser().parse_args(["demo", *["--rounds", "1"] * options.small])
    found = demo.compile_all(demo.SMALL if options.small else demo.DEMO, plain)
    if options.json:
        text = json.dumps([result for _, result in found], indent=2)
        _own(options.json, "models", options).write_text(text + "\n", encoding="utf-8")
    return max(code for code, _ in found)


def _own(file: Path, name: str, options: argparse.Namespace) -> Path:
    """The file of one suite: if there are several, each writes files of its own."""
    several = len(options.suite) > 1
    return file.with_name(f"{file.stem}-{name}{file.suffix}") if several else file


def _known(options: argparse.Namespace) -> list[gpu.Row]:
    """The rows of an earlier run."""
    if not options.resume or not options.json or not options.json.exists():
        return []
    try:
        return [gpu.Row(**row) for row in json.loads(options.json.read_text())["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise TargetError(f"--resume: {options.json} holds no figures of a GPU: {problem}") from problem


_ON_THE_CPU: dict[str, Any] = {
    "attention": attention_cpu, "decode": decoding, "mla": latent, "peers": peers, "states": states,
}  # fmt: skip


def _measure_cpu(name: str, options: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Run one of the CPU benchmarks."""
    with tempfile.TemporaryDirectory() as folder:
        file = _own(options.json, name, options) if options.json else Path(folder) / "results.json"
        _ON_THE_CPU[name].main(["--json", str(file), *more])
        if options.plot:
            bars = _ON_THE_CPU[name].bars(json.loads(file.read_text()))
            _draw(bars, _own(options.plot, name, options))


def _draw(bars: Bars, path: Path) -> None:
    try:
        draw(bars, path)
    except (OSError, ValueError) as problem:
        raise TargetError(f"cannot draw {path}: {problem}") from problem
