"""`attngraph verify REFERENCE CANDIDATE`: whether two models compute the same; 0 equal, 1 not, 2 unknown."""

import argparse
import json
from pathlib import Path

from attngraph.api.verdict import STATUSES
from attngraph.api.verify import verify
from attngraph.cli.target import load_side, load_target
from attngraph.cli.terminal import Progress, TargetError, told


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        TargetError: a target, or the file of names, cannot be used.
    """
    rename = _names(options.rename)
    tell = Progress()
    tell(f"building {options.reference}")
    reference, inputs = load_target(options.reference, batch=options.batch, tokens=options.tokens)
    tell(f"building {options.candidate}")
    candidate, _ = load_side(options.candidate)
    tell("comparing")
    verdict = verify(
        reference, candidate, inputs, rename=rename, gradients=not options.no_gradients, seed=options.seed,
        budget=options.budget,
    )  # fmt: skip
    tell.done()
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
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise TargetError(f"--rename: cannot read {path}: {told(problem)}") from problem
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise TargetError(f"--rename: {path} must hold one JSON object of names.")
    return found
