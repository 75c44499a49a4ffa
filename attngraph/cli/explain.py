"""`attngraph explain TARGET`: what was fused, and each place that was not, with the code of its reason and
what to change. Nothing is compared with eager or timed; exit code 0, whatever was found."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from attngraph.api.compile import explain
from attngraph.cli.target import load_target, run_as_given, shapes_of
from attngraph.cli.terminal import Progress
from attngraph.report.entries import Place
from attngraph.report.report import CompileReport


def run(options: argparse.Namespace) -> int:
    _, inputs, report = explained(options)
    if options.json:
        print(json.dumps(told(options.target, inputs, report), indent=2))
    else:
        print("\n".join([str(report), *(line for place in report.places for line in lines(place))]))
    return 0


def explained(options: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...], CompileReport]:
    """The target's model, its inputs, and the report of compiling it. What the model prints goes to standard
    error."""
    tell = Progress()
    with contextlib.redirect_stdout(sys.stderr):
        tell(f"compiling {options.target}")
        model, inputs = load_target(options.target, batch=options.batch, tokens=options.tokens)
        report = run_as_given(lambda *given: explain(model, *given), model, inputs, options.target)
    tell.done()
    return model, inputs, report


def told(target: str, inputs: tuple[Any, ...], report: CompileReport) -> dict[str, Any]:
    """The report as --json prints it: attentions, and places that were left alone."""
    places = [asdict(place) for place in report.places]
    found = json.loads(report.to_json())["attention"]
    return {"target": target, "inputs": shapes_of(inputs), "attention": found, "places": places}


def lines(place: Place) -> list[str]:
    """A place in words."""
    return ["", f"  {place.code}   {place.place}", f"      {place.reason}", f"      change: {place.change}"]
