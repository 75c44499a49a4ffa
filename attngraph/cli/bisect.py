"""`attngraph bisect TARGET`: the first pass after which a model's answer is not eager's."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from attngraph.api.bisect import bisect
from attngraph.api.options import BACKENDS, make_options
from attngraph.cli.progress import Progress
from attngraph.cli.target import add_target, load_target


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bisect",
        help="find the first pass after which a model's answer is not eager's",
        epilog="example: attngraph bisect attngraph.models.targets:tiny_decoder_lm --tokens 64. Exit code 1 "
        "if a pass is found; attngraph.compile(model, disable=('PASS',)) compiles without it.",
    )
    add_target(parser)
    parser.add_argument("--backend", default="auto", choices=BACKENDS, help="whose kernels to use")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    tell = Progress()
    tell(f"building {options.target}")
    model, inputs = load_target(options.target, batch=options.batch, tokens=options.tokens)
    found = bisect(model, *inputs, options=make_options(options.backend), progress=tell)
    tell.done()
    if options.json:
        steps = [{**asdict(step), "holds": step.holds} for step in found.steps]
        print(json.dumps({"target": options.target, "culprit": found.culprit, "steps": steps}, indent=2))
    else:
        print(f"== {options.target}\n\n{found}")
    return 1 if found.culprit else 0
