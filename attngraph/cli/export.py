"""`attngraph export TARGET -o FILE`: a model, or its decoder, as a file that runs without attngraph."""

import argparse
import dataclasses
import json
from typing import Any

import torch

from attngraph.api.compile import compile as compiled_model
from attngraph.cli.target import load_target, run_as_given
from attngraph.cli.terminal import Progress, TargetError
from attngraph.errors import ExportError, told_as
from attngraph.exporter.export import FORMATS, export
from attngraph.exporter.formats import require_place


def run(options: argparse.Namespace) -> int:
    with told_as(TargetError, ExportError):  # before anything is built
        format = FORMATS.get(options.format or options.out.suffix.removeprefix("."))
        if format is not None:
            format.require()
        require_place(options.out)
    tell = Progress()
    tell(f"building {options.target}")
    model, inputs = load_target(options.target, batch=options.batch, tokens=options.tokens)
    with torch.no_grad():
        run_as_given(model, model, inputs, options.target)
    made: Any = compiled_model(model, cache=options.decoder)
    tell(f"writing {options.out}")
    with told_as(TargetError, ValueError):
        report = export(
            made, options.out, inputs, format=options.format or "", fallback=options.fallback,
            check=not options.no_check, padding=not options.no_padding,
        )  # fmt: skip
    tell.done()
    if options.json:
        found = {"target": options.target, **dataclasses.asdict(report), "path": str(report.path)}
        del found["stores"]
        print(json.dumps(found, indent=2))
    else:
        print(report)
    return 0
