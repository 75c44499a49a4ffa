"""What a trace decided about sizes: the answers that Python code got to questions such as `n > 6`.

Torch notes a question as a condition of the graph, but for those that it answers by what it takes for
granted: that a symbolic size is at least 2. One row, or one token, may have another answer. Here every
question is noted, with its answer and the user's line, that was asked by code which runs without a trace,
too: the user's, and that of torch's layers. What torch asks itself while it traces (whether a tensor is
contiguous, say) does not decide what the model does."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from attngraph.capture.checks import passing_answer
from attngraph.capture.sides import Decision
from attngraph.ir.graph.source import short_path

_TORCH = os.path.dirname(torch.__file__) + os.sep
_CAPTURE = os.path.dirname(__file__) + os.sep
_TRACING = (
    "fx", "_subclasses", "_prims", "_prims_common", "_refs", "_decomp", "_dispatch", "_export", "export",
    "_higher_order_ops", "_functorch", "_library", "_logging", "_dynamo", "utils", "_meta_registrations.py",
    "_ops.py", "_guards.py", "_compile.py", "_jit_internal.py", "overrides.py",
)  # fmt: skip
"""The parts of torch that run in a trace alone, and those that stand between them and what asks."""
_PASSED_ON = (_TORCH + "__init__.py", _CAPTURE, contextlib.__file__, functools.__file__)
"""Code that asks for what calls it."""


class Decisions:
    """The decisions of a trace."""

    def __init__(self) -> None:
        self._found: dict[Decision, None] = {}
        self._one: dict[Any, Any] = {}

    def begin(self, shapes: Sequence[torch.Size], place: tuple[int, int] | None) -> None:
        """A trace of arguments with these shapes begins. `place`: a dimension, (argument, dimension), about
        which questions are answered as if it were 1, although it is a symbol: a graph for one sequence then
        has an axis of sequences."""
        size: Any = None if place is None else shapes[place[0]][place[1]]
        self._one = {size.node.expr: sympy.Integer(1)} if isinstance(size, torch.SymInt) else {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Note what is asked while this is active."""
        ask = torch.SymBool.__bool__

        def answered(value: torch.SymBool) -> bool:
            formula = value.node.expr
            asks = None
            if getattr(formula, "free_symbols", ()) and not free_unbacked_symbols(formula):
                asks = _asking(sys._getframe(1))
            if asks is None:
                return ask(value)
            if not self._one.keys().isdisjoint(formula.free_symbols):
                env: Any = value.node.shape_env
                formula = formula.xreplace(self._one)
                answer = bool(env.evaluate_expr(formula))
            else:
                answer = ask(value)
            relation = formula if answer else sympy.Not(formula)
            self._found[Decision(relation, _line_of(asks), passing_answer(asks) is answer)] = None
            return answer

        with mock.patch.object(torch.SymBool, "__bool__", answered):
            yield

    def found(self, env: Any) -> tuple[Decision, ...]:
        """The decisions, in the sizes that are left at the end of the trace."""
        if env is None:
            return ()
        told = (d._replace(relation=env.replace(d.relation)) for d in self._found)
        return tuple(dict.fromkeys(d for d in told if getattr(d.relation, "free_symbols", ())))


def _asking(frame: Any) -> Any:
    """The frame that asks; None if it is torch's own, for the trace."""
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_ON):
        frame = frame.f_back
    return None if frame is None or _is_tracing(frame.f_code.co_filename) else frame


def _line_of(frame: Any) -> str:
    """The user's line: a question of torch's layers is told as one of the line that calls them."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def _is_tracing(file: str) -> bool:
    return file.startswith(_TORCH) and file.removeprefix(_TORCH).split(os.sep)[0] in _TRACING
