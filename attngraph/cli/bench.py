"""`attngraph bench`: attention compared with other implementations and with the machine's limits."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attngraph.benchmark import attention_cpu, decoding, gpu, latent, peers
from attngraph.benchmark.plot import Bars, draw
from attngraph.cli.compile import run_demo
from attngraph.cli.progress import Progress
from attngraph.cli.target import TargetError
from attngraph.codegen.triton import store


def add(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure attention beside what else there is, in one run",
        epilog="example: attngraph bench --suite decode --json decode.json --plot decode.png. On a GPU: "
        "attention, decode and mla beside the card's limits; on the CPU each suite is a run of "
        "python -m attngraph.benchmark.attention_cpu (decoding, latent). models: `attngraph demo`. peers: "
        "whole models on the CPU beside torch.compile, OpenVINO and onnxruntime",
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    bench.add_argument("--device", default=here, choices=("cpu", "cuda"))
    bench.add_argument("--suite", nargs="+", default=["attention"], choices=(*gpu.SUITES, "models", "peers"))
    bench.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    bench.add_argument("--small", action="store_true", help="tiny cells on any device, to see that it works")
    part = bench.add_argument_group("parts of the suites", "on a GPU, where a run takes long")
    part.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cells with all of these texts")
    part.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave out these candidates")
    part.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many")
    part.add_argument("--resume", action="store_true", help="go on from the cells in the file of --json")
    part.add_argument("--tune", action="store_true", help="measure our block sizes first, and store them")
    bench.set_defaults(
        batch=None, dump=None, strict=False, backend="auto", inductor=False, absorb="auto", rounds=5,
        no_torch_compile=False, run=run,
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure suites. GPUs and CPUs have different benchmarks, since they are used for different tasks."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise TargetError("--device cuda: PyTorch finds no GPU here; --device cpu measures this machine.")
    models = "models" in options.suite
    suites = [name for name in options.suite if name not in ("models", "peers")]
    if models:
        printed, options.json = options.json, False
        code = run_demo(options)
        options.json = printed
        if code:
            return code
    if "peers" in options.suite:
        _measure_cpu("peers", options, len(suites) > 0, ["--small"] if options.small else [])
    if not suites:
        return 0
    if options.device == "cpu" and not options.small:
        for name in suites:
            _measure_cpu(name, options, len(suites) > 1)
        return 0
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
    keep(about, rows)
    rows = [*known, *rows]
    print(gpu.table(about, rows))
    if options.plot:
        _draw(gpu.bars(about, rows), options.plot)
    return 0


def _known(options: argparse.Namespace) -> list[gpu.Row]:
    """The rows of an earlier run."""
    if not options.resume or not options.json or not options.json.exists():
        return []
    try:
        return [gpu.Row(**row) for row in json.loads(options.json.read_text())["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise TargetError(f"--resume: {options.json} holds no figures of a GPU: {problem}") from problem


_ON_THE_CPU: dict[str, Any] = {
    "attention": attention_cpu, "decode": decoding, "mla": latent, "peers": peers,
}  # fmt: skip


def _measure_cpu(
    name: str, options: argparse.Namespace, is_one_of_several: bool, more: Sequence[str] = ()
) -> None:
    """Run one of the CPU benchmarks; if there are several, each writes files of its own."""

    def own(file: Path) -> Path:
        return file.with_name(f"{file.stem}-{name}{file.suffix}") if is_one_of_several else file

    with tempfile.TemporaryDirectory() as folder:
        file = own(options.json) if options.json else Path(folder) / "results.json"
        _ON_THE_CPU[name].main(["--json", str(file), *more])
        if options.plot:
            _draw(_ON_THE_CPU[name].bars(json.loads(file.read_text())), own(options.plot))


def _draw(bars: Bars, path: Path) -> None:
    try:
        draw(bars, path)
    except ModuleNotFoundError as problem:
        raise TargetError('--plot needs matplotlib: pip install "attngraph[plot]"') from problem
    except (OSError, ValueError) as problem:
        raise TargetError(f"cannot draw {path}: {problem}") from problem
