"""`attngraph verify REFERENCE CANDIDATE`: whether two models compute the same; 0 equal, 1 not, 2 unknown."""

import argparse
import json
from pathlib import Path

from attngraph.api.verify import verify
from attngraph.api.verify.verdict import STATUSES
from attngraph.cli.target import load_inputs, load_side, load_target
from attngraph.cli.terminal import Progress, TargetError, check_writable, told
from attngraph.errors import told_as
from attngraph.ir.records import write_whole


def run(options: argparse.Namespace) -> int:
    rename = _names(options.rename)
    tell = Progress()
    sizes = {"batch": options.batch, "tokens": options.tokens}
    check_writable(options.html, "--html")
    tell(f"building {options.reference}")
    if options.inputs is None:
        reference, inputs = load_target(options.reference, **sizes)
    else:
        (reference, _), inputs = load_side(options.reference), load_inputs(options.inputs, **sizes)
    candidate = options.candidate
    if not options.subprocess:
        tell(f"building {candidate}")
        candidate, _ = load_side(candidate)
    tell("comparing")
    with told_as(TargetError, TypeError):  # of what is given alone: what a side raises is part of the verdict
        verdict = verify(
            reference, candidate, inputs, rename=rename, gradients=not options.no_gradients,
            seed=options.seed, budget=options.budget, subprocess=options.subprocess, seconds=options.seconds,
            memory=int(options.memory),
        )  # fmt: skip
    tell.done()
    if options.html is not None:
        write_whole(options.html, verdict.html(f"{options.reference} and {options.candidate}"))
    if options.json:
        named = {"reference": options.reference, "candidate": options.candidate}
        print(json.dumps({**named, **verdict.json()}, indent=2))
    else:
        print(verdict)
    return STATUSES.index(verdict.status)


def _names(path: Path | None) -> dict[str, str]:
    """The names of weights in a file."""
    if path is None:
        return {}
    with told_as(TargetError, OSError, ValueError, before=f"--rename: cannot read {path}: ", words=told):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise TargetError(f"--rename: {path} must hold one JSON object of names.")
    return found
