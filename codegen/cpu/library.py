"""From a plan to a loaded library: emitted as C, compiled once, cached for the process."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import threading

from attngraph.codegen.cpu import source, source_backward, toolchain
from attngraph.codegen.cpu.source import Plan, Source
from attngraph.codegen.cpu.source_backward import BackwardPlan
from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language.score import ScoreProgram

_log = logging.getLogger("attngraph.codegen.cpu")


@dataclasses.dataclass(frozen=True)
class Library:
    """A compiled plan: its functions, the source (which lists the arguments it needs), and the seconds spent
    compiling it (0 where it came from the cache)."""

    code: ctypes.CDLL
    source: Source
    lanes: int
    seconds: float


_libraries: dict[Plan, Library | str] = {}
"""The library of each plan, or the reason why there is none."""
_lock = threading.Lock()


def library(plan: Plan) -> Library | str:
    """The library of a plan, compiled if there is none yet, or why there is none (logged once)."""
    with _lock:
        found = _libraries.get(plan)
        if found is None:
            try:
                text = source_backward.write(plan) if isinstance(plan, BackwardPlan) else source.write(plan)
                code, seconds = toolchain.build(text.text)
                lanes = ctypes.c_int.in_dll(code, "attngraph_lanes").value
                found = Library(code, text, lanes, seconds)
            except (UnsupportedError, toolchain.CompilerError) as error:
                found = str(error)
                _log.warning("not compiled, PyTorch's operations instead: %s\n%s", error, plan.program)
            _libraries[plan] = found
    return found


def compile_seconds(program: ScoreProgram) -> float:
    """Seconds spent in the C compiler for a program so far in this process."""
    plans = {p: made for p, made in _libraries.items() if p.program == program.without_scale}
    return sum(made.seconds for made in plans.values() if isinstance(made, Library))
