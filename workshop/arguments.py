"""The arguments of the workshop's commands. Nothing here imports torch."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from attngraph.cli.arguments import POSITIVE, at_least

SUITES = ("attention", "decode", "mla")
OTHER_SUITES = ("models", "peers", "states", "scorecard", "gpu")
TARGETS = ("sm_90", "sm_80", "gfx942")
"""GPUs that the scorecard compiles for; the first two if none is named."""


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m workshop`."""
    made = argparse.ArgumentParser(
        "python -m workshop", description="Measures attngraph beside others, and looks for what breaks it."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_bench, _fuzz):
        add(commands)
    return made


def _bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure attention beside what else there is, in one run",
        epilog="example: python -m workshop bench --suite decode --json decode.json --plot decode.png. On a "
        "GPU: attention, decode and mla beside the card's limits; on the CPU each suite is a run of "
        "python -m workshop.bench.attention_cpu (decoding, latent). models: `attngraph demo`. peers: "
        "whole models on the CPU beside torch.compile, OpenVINO and onnxruntime. states: models whose memory "
        "does not grow, on the CPU. scorecard: what kernels cost by their machine code, without a GPU. gpu: "
        "all of it on a borrowed GPU in half an hour",
    )
    bench.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one, else the CPU"
    )
    bench.add_argument("--suite", nargs="+", default=["attention"], choices=(*SUITES, *OTHER_SUITES))
    bench.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    bench.add_argument("--small", action="store_true", help="tiny cells on any device, to see that it works")
    part = bench.add_argument_group("parts of the suites", "on a GPU, where a run takes long")
    part.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cells with all of these texts")
    part.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave out these candidates")
    part.add_argument(
        "--minutes", type=at_least(0, float), default=math.inf, help="begin no cell after so many"
    )
    part.add_argument("--resume", action="store_true", help="go on from the cells in the file of --json")
    part.add_argument("--tune", action="store_true", help="measure our block sizes first, and store them")
    card = bench.add_argument_group("the scorecard", "which needs no GPU; --only and --json hold for it too")
    card.add_argument(
        "--target", nargs="+", choices=TARGETS, default=list(TARGETS[:2]),
        help=f"GPUs to compile for (default: {', '.join(TARGETS[:2])})",
    )  # fmt: skip
    card.add_argument(
        "--rewrite-budgets", action="store_true", help="make the figures found those that may not get worse"
    )


def _fuzz(commands: Any) -> None:
    fuzz = commands.add_parser(
        "fuzz",
        help="compile random attention-like graphs and compare each with eager",
        epilog="example: python -m workshop fuzz --minutes 5 --seed 7. A failure is made small and printed "
        "as a test; exit code 1 if there was one.",
    )
    fuzz.add_argument(
        "--minutes", type=at_least(0, float), help="how long to run (default 5, unless --graphs is given)"
    )
    fuzz.add_argument("--graphs", type=POSITIVE, help="how many graphs to run")
    fuzz.add_argument("--seed", type=int, default=0, help="which graphs: the same seed, the same graphs")
    fuzz.add_argument(
        "--only", type=at_least(0), metavar="N", help="run graph N of the seed alone, and show it"
    )
    fuzz.add_argument(
        "--jobs", type=POSITIVE, default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    fuzz.add_argument("--out", type=Path, metavar="DIR", help="write the test of each failure here")
    fuzz.add_argument("--json", action="store_true", help="print one JSON object")
