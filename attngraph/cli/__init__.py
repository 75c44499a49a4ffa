"""The command line: `attngraph COMMAND ...`, one file per command.

Arguments are in `arguments.py`, which imports no torch; a command's file is imported when the command is
run, by its `run(options)`, which returns the exit code. Results go to standard output, progress to standard
error. Exit codes: 0 success; 1 a negative result (the compiled model does not agree with the eager one,
something was not fused under --strict, a bisection found a pass, two models differ); 2 the command or its
arguments cannot be used, or two models cannot be compared; 130 interrupted.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from attngraph.cli.arguments import parser
from attngraph.cli.terminal import TargetError
from attngraph.errors import AttnGraphError, BackendError, DumpError, TextError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_args(argv)
    module = "compile" if options.command == "bench" else options.command

    def run() -> int:
        code: int = importlib.import_module(f"attngraph.cli.{module}").run(options)
        return code

    return run_told("attngraph", run)


def run_told(program: str, run: Callable[[], int]) -> int:
    """The exit code of what a program does; what goes wrong is told as one line of that program."""
    try:
        return run()
    except (TargetError, BackendError, DumpError, TextError) as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 2
    except AttnGraphError as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
