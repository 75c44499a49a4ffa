"""`python -m workshop fuzz`: random attention-like graphs against eager."""

from __future__ import annotations

import argparse
import json

from attngraph.cli.terminal import Progress, TargetError
from workshop.fuzz import run as fuzzing


def run(options: argparse.Namespace) -> int:
    first, graphs, minutes, jobs = 0, options.graphs, options.minutes, options.jobs
    if options.only is not None:
        first, graphs, minutes, jobs = options.only, 1, None, 1
    elif graphs is None and minutes is None:
        minutes = 5.0
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise TargetError(f"--out: cannot write to {options.out}: {problem.strerror}.") from problem
    tell = Progress(every=10)
    found = fuzzing.run(fuzzing.Options(options.seed, minutes, graphs, jobs, options.out, first), tell)
    tell.done()
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        shown = "" if options.only is None else fuzzing.text_of(options.seed, options.only) + "\n"
        print(f"{shown}{found}")
    return 1 if found.failures else 0
