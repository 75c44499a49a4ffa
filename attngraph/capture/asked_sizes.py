"""Sizes of which the model asks for the number itself: `len(x)`, `range(n)`, `int(n)`, an operation of torch
that takes numbers alone (`triu_indices`).

torch then makes a number of the size without a word, and the graph serves that number alone. Here the first
line that asks is noted, for the report. (Nobody asks for a size that is a number because a weight has it.)
Used by `trace.py`.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
from torch.fx.experimental.sym_node import SymNode

from attngraph.capture.flat import Trace
from attngraph.capture.instead import replaced
from attngraph.capture.stack_traces import user_lines
from attngraph.ir.graph.source import short_path
from attngraph.report.entries import Break


@contextlib.contextmanager
def asked_sizes(trace: Trace) -> Iterator[None]:
    """Note the dimensions of arguments for whose number the code asks, with the size's name and the line."""
    guard = SymNode.guard_int

    def noted(node: Any, file: str, line: int) -> Any:
        for name in map(str, node.expr.free_symbols):
            dimensions = trace.of(frozenset({name})) - set(trace.asked)
            lines = user_lines(sys._getframe(1)) if dimensions else ()
            if lines:
                trace.asked.update(dict.fromkeys(dimensions, (name, *lines[-1][:2])))
        return guard(node, file, line)

    with replaced(SymNode, "guard_int", noted):
        yield


def told(trace: Trace, shapes: Sequence[Sequence[Any]], conditions: Sequence[Any]) -> tuple[Break, ...]:
    """What the report says of them: of those that became numbers, or that a condition of the graph fixes."""
    fixed = {str(s) for c in conditions if isinstance(c, sympy.Eq) for s in c.free_symbols}
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for (argument, dim), (name, path, line) in sorted(trace.asked.items()):
        if name in fixed or isinstance(shapes[argument][dim], int):
            found.setdefault((path, line), []).append((argument, dim))
    return tuple(
        Break(
            "the code asks for the number itself of "
            + " and ".join(f"dimension {d} of tensor argument {a}" for a, d in dimensions)
            + f": {linecache.getline(path, line).strip()}",
            f"{short_path(path)}:{line}",
        )
        for (path, line), dimensions in found.items()
    )
