"""`attngraph plan TARGET --ranks N --memory SIZE`: the ways to run a model on many ranks, without them."""

import argparse
import contextlib
from typing import Any

from torch import nn

from attngraph.api.plan import plan
from attngraph.api.plan_memory import WithoutMemory, fill
from attngraph.cli.target import load_target, run_as_given
from attngraph.cli.terminal import Progress, TargetError
from attngraph.errors import CaptureError, first_line, told_as
from attngraph.report.plan import Machine


def run(options: argparse.Namespace) -> int:
    tell = Progress()
    tell(f"building {options.target}")
    model, inputs = _built(options, tell)
    machine = Machine(options.flops, options.bandwidth, options.link, options.memory)
    with told_as(TargetError, CaptureError, ValueError, before=f"{options.target}: ", words=first_line):
        found = run_as_given(
            lambda *given: plan(model, given, options.ranks, machine, options.group, tell, options.training),
            model, inputs, options.target,
        )  # fmt: skip
    tell.done()
    if options.json:
        print(found.to_json())
    else:
        print(f"{options.target} on {options.ranks:,} ranks\n\n{found}")
    return 0 if found.chosen is not None else 1


def _built(options: argparse.Namespace, tell: Progress) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model without memory for its weights if it can be built so, else with it."""
    sizes = {"batch": options.batch, "tokens": options.tokens}
    with contextlib.suppress(TargetError, AttributeError):
        with WithoutMemory():
            model, inputs = load_target(options.target, **sizes)
        if fill(model, inputs):
            return model, inputs
    tell("building it again, with memory for its weights: it needs the contents of some")
    return load_target(options.target, **sizes)
