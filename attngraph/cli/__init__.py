"""The command line: `attngraph COMMAND ...`, one file per command.

A command's file adds its arguments with `add(commands)` and is run by `run(options)`, which returns the exit
code. Results go to standard output, progress to standard error. Exit codes: 0 all good, 1 the answer is no
(the compiled model does not agree with the eager one, something was not fused under --strict, fuzzing found
a failure, a bisection found a pass), 2 the command or what it is given cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from attngraph.cli import bench, bisect, compile, fuzz, inspect, opt, show
from attngraph.cli.target import TargetError
from attngraph.errors import AttnGraphError, DumpError, TextError

COMMANDS = (compile, inspect, opt, bisect, show, bench, fuzz)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = _parser().parse_args(argv)
    try:
        code: int = options.run(options)
        return code
    except (TargetError, DumpError, TextError) as problem:
        print(f"attngraph: {problem}", file=sys.stderr)
        return 2
    except AttnGraphError as problem:
        print(f"attngraph: {problem}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("attngraph", description="A compiler for attention.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
