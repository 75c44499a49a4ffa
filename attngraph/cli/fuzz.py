"""`attngraph fuzz`: random attention-like graphs against eager."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from attngraph.cli.progress import Progress
from attngraph.cli.target import TargetError
from attngraph.fuzz import run as fuzzing


def add(commands: Any) -> None:
    fuzz = commands.add_parser(
        "fuzz",
        help="compile random attention-like graphs and compare each with eager",
        epilog="example: attngraph fuzz --minutes 5 --seed 7. A failure is made small and printed as a test; "
        "exit code 1 if there was one.",
    )
    fuzz.add_argument("--minutes", type=float, help="how long to run (default 5, unless --graphs is given)")
    fuzz.add_argument("--graphs", type=int, help="how many graphs to run")
    fuzz.add_argument("--seed", type=int, default=0, help="which graphs: the same seed, the same graphs")
    fuzz.add_argument("--only", type=int, metavar="N", help="run graph N of the seed alone, and show it")
    fuzz.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    fuzz.add_argument("--out", type=Path, metavar="DIR", help="write the test of each failure here")
    fuzz.add_argument("--json", action="store_true", help="print one JSON object")
    fuzz.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.jobs < 1:
        raise TargetError(f"--jobs must be at least 1, found {options.jobs}.")
    first, graphs, minutes, jobs = 0, options.graphs, options.minutes, options.jobs
    if options.only is not None:
        first, graphs, minutes, jobs = options.only, 1, None, 1
    elif graphs is None and minutes is None:
        minutes = 5.0
    tell = Progress(every=10)
    found = fuzzing.run(fuzzing.Options(options.seed, minutes, graphs, jobs, options.out, first), tell)
    tell.done()
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        shown = "" if options.only is None else fuzzing.text_of(options.seed, options.only) + "\n"
        print(f"{shown}{found}")
    return 1 if found.failures else 0
