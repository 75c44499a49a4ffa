"""`python -m workshop`."""

import sys
from collections.abc import Sequence

from attngraph.cli import run_command
from workshop.arguments import parser

MODULES = {"bench": "workshop.bench.command", "fuzz": "workshop.fuzz.command"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    options = parser().parse_args(argv)
    return run_command("workshop", MODULES[options.command], options)


if __name__ == "__main__":
    sys.exit(main())
