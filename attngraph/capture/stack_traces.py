"""Where in the user's code each operation of a trace is, noted at every operation.

Torch's tracer looks at all frames of the stack, most of them its own, and writes out those of functions that
are called `forward`, which loses lines in helper functions. Here frames are walked from the operation up to
the wrapper that is traced. Equal operations of equal layers have equal stacks, each of which is written out
once. Used by `trace.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from attngraph.capture.flat import Flat
from attngraph.capture.instead import replaced

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LAYERS = os.path.join(_TORCH, "nn") + os.sep
_CAPTURE = os.path.dirname(__file__) + os.sep
_WRAPPER = inspect.unwrap(Flat.forward).__code__
_Line = tuple[str, int, str]
"""The file, the number and the function of a line."""


@contextlib.contextmanager
def whole_stack_traces() -> Iterator[None]:
    """Let traces record every line of the user's code. Of torch's own frames only those of its layers are
    kept."""
    written: dict[tuple[_Line, ...], str] = {}

    class Stack:
        """The stack of an operation, in place of torch's `CapturedTraceback`."""

        def __init__(self, lines: tuple[_Line, ...]) -> None:
            self.lines = lines

        @staticmethod
        def extract(*_: Any, **__: Any) -> Stack:
            return Stack(user_lines(sys._getframe(1)))

        def summary(self) -> Stack:
            return self

        def __len__(self) -> int:
            return len(self.lines)

        def format(self) -> list[str]:
            if self.lines not in written:
                written[self.lines] = "".join(_summary(self.lines).format())
            return [written[self.lines]]

    with (
        replaced(fx.proxy, "CapturedTraceback", Stack),
        replaced(fx.proxy.TracerBase, "_filter_traceback_frames", lambda _, stack: stack),
    ):
        yield


def user_lines(frame: Any) -> tuple[_Line, ...]:
    """The lines that are told, from that which the wrapper calls to the innermost one."""
    found: list[_Line] = []
    while frame is not None and frame.f_code is not _WRAPPER:
        code = frame.f_code
        if _is_told(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


def _summary(lines: tuple[_Line, ...]) -> traceback.StackSummary:
    return traceback.StackSummary.from_list([traceback.FrameSummary(*line) for line in lines])


@functools.lru_cache(maxsize=4096)
def _is_told(file: str) -> bool:
    """Whether lines of this file say where in the user's code an operation is, or in which layer: not those
    that replace torch's own functions during a trace."""
    return not file.startswith(_CAPTURE) and (not file.startswith(_TORCH) or file.startswith(_LAYERS))
