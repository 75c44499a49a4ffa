"""The command line: `attngraph COMMAND ...`, one file per command.

A command's file adds its arguments with `add(commands)` and is run by `run(options)`, which returns the exit
code. Results go to standard output, progress to standard error. Exit codes: 0 success; 1 a negative result
(the compiled model does not agree with the eager one, something was not fused under --strict, fuzzing found
a failure, a bisection found a pass); 2 the command or its arguments cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from attngraph import __version__
from attngraph.cli import bench, bisect, compile, fuzz, inspect, opt, show
from attngraph.cli.target import TargetError
from attngraph.errors import AttnGraphError, DumpError, TextError

_EPILOG = """\
to begin with:
  attngraph compile attngraph.models.targets:tiny_decoder_lm --tokens 64 --dump out
  attngraph inspect out --open
  attngraph show "keep k <= q and k > q - 16"

TARGET is package.module:callable; the callable returns (model, inputs), and may take batch and tokens.
Results go to standard output, progress to standard error; every command has --json.
exit codes: 0 all good; 1 the answer is no (not equal to eager, not fused under --strict, a failure
found); 2 the command or what it was given cannot be used.
"""
COMMANDS = (compile, inspect, opt, bisect, show, bench, fuzz)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
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
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "attngraph", description="A compiler for attention: what it makes of a model, and why.",
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EPILOG,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"attngraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
