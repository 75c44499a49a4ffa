"""`attngraph bench`: attention beside what else there is, and beside what the machine can do."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from attngraph.cli.compile import run_demo
from attngraph.cli.progress import Progress
from attngraph.cli.target import TargetError
from attngraph.codegen.benchmark import attention_cpu, decoding, gpu, latent


def add(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure attention beside what else there is, in one run",
        epilog="on a GPU: attention, decode and mla beside the card's limits; on the CPU each suite is a run "
        "of python -m attngraph.codegen.benchmark.attention_cpu (decoding, latent); models: `attngraph demo`",
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    bench.add_argument("--device", default=here, choices=("cpu", "cuda"))
    bench.add_argument("--suite", nargs="+", default=["attention"], choices=(*gpu.SUITES, "models"))
    bench.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    bench.add_argument("--small", action="store_true", help="tiny cells on any device, to see that it works")
    bench.set_defaults(
        batch=None, dump=None, strict=False, backend="auto", inductor=False, absorb="auto", rounds=5,
        no_torch_compile=False, run=run,
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure suites. What a GPU is asked and what a CPU is asked differ, so their benchmarks do."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise TargetError("--device cuda: PyTorch finds no GPU here; --device cpu measures this machine.")
    models = "models" in options.suite
    suites = [name for name in options.suite if name != "models"]
    if models:
        printed, options.json = options.json, False
        code = run_demo(options)
        options.json = printed
        if code or not suites:
            return code
    if options.device == "cpu" and not options.small:
        modules = {"attention": attention_cpu, "decode": decoding, "mla": latent}
        for name in suites:
            file = options.json and options.json.with_name(f"{options.json.stem}-{name}{options.json.suffix}")
            modules[name].main(["--json", str(file)] if file else [])
        return 0
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    tell = Progress()
    about, rows = gpu.run(suites, options.device, dtype, options.small, tell)
    tell.done()
    print(gpu.table(about, rows))
    if options.json:
        found = {**about, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.plot:
        try:
            gpu.plot(about, rows, options.plot)
        except ModuleNotFoundError as problem:
            raise TargetError('--plot needs matplotlib: pip install "attngraph[plot]"') from problem
    return 0
