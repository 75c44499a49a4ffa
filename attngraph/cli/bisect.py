"""`attngraph bisect TARGET`: the first pass after which a model's answer is not eager's."""

import argparse
import json
from dataclasses import asdict

import torch

from attngraph.api.bisect import bisect
from attngraph.api.options import make_options
from attngraph.cli.target import changed_by, load_target, run_as_given
from attngraph.cli.terminal import Progress


def run(options: argparse.Namespace) -> int:
    tell = Progress()
    tell(f"building {options.target}")
    model, inputs = load_target(options.target, batch=options.batch, tokens=options.tokens)
    with torch.no_grad():
        run_as_given(model, model, inputs, options.target)
    chosen = make_options(backend=options.backend, passes=changed_by(options.add))
    found = bisect(model, *inputs, options=chosen, progress=tell)
    tell.done()
    if options.json:
        steps = [{**asdict(step), "holds": step.holds} for step in found.steps]
        print(json.dumps({"target": options.target, "culprit": found.culprit, "steps": steps}, indent=2))
    else:
        print(f"== {options.target}\n\n{found}")
    return 1 if found.culprit else 0
