"""`attngraph compile TARGET --page FILE`: the report as a page, with what a sample input shows: the times of
operations, and the weights of one of each group of equal attentions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from attngraph.api.compiled import CompiledModule
from attngraph.errors import CaptureError
from attngraph.report.entries import AttentionEntry, folded

_MOST_BYTES = 1 << 26
"""Most bytes of the weights of one attention that is drawn."""


def write_page(compiled: CompiledModule, inputs: tuple[Any, ...], page: Path, title: str) -> None:
    """Write the page of a compiled model and print its name.

    Raises:
        DumpError: it cannot be written.
    """
    report, times, weights = compiled.report, None, dict[str, Tensor]()
    try:
        times = compiled.times(*inputs)
        for entry, *_ in folded(report.attention):
            weights |= _weights(compiled, inputs, entry)
    except CaptureError as problem:
        print(f"attngraph: {problem.reason}: no times and no weights in the page", file=sys.stderr)
    report.to_html(page, title, weights, times=times)
    print(f"attngraph: the page is {page}", file=sys.stderr)


def _weights(compiled: CompiledModule, inputs: tuple[Any, ...], entry: AttentionEntry) -> dict[str, Tensor]:
    """The weights of an attention for the first row of the inputs; none if they are many."""
    if entry.call is None or entry.score_bytes is None:
        return {}
    if entry.score_bytes // max(entry.call.batch, 1) > _MOST_BYTES:
        return {}
    name = entry.name or "attention"
    for at in (name, f"{name}#0"):
        try:
            weights = compiled.weights(*inputs, at=[at], rows=slice(0, 1))
        except ValueError:
            continue  # a module with several attentions
        assert isinstance(weights, dict)
        return weights
    return {}
