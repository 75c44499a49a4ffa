"""The report's records of results that are computed when somebody looks at them: names and costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from attngraph.capture.captured import Captured
from attngraph.ir.graph.program_graph import ProgramGraph, Rate, part_of
from attngraph.meaning.algebra.sizes import evaluate_size, size_expression
from attngraph.report.entries import LaterEntry


def later_of(captured: Captured) -> tuple[LaterEntry, ...]:
    """An entry for each look that a call may be followed by."""
    stage = captured.graph.stages.get(Rate.LOOK)
    if stage is None:
        return ()
    results: Any = stage.graph.output_node().args[0]
    names = captured.names()
    looks: dict[int | None, dict[str, fx.Node]] = {}
    for node, output in zip(results, stage.outputs, strict=True):
        if output.place is not None:
            looks.setdefault(output.look, {})[names[output.place]] = node
    return tuple(_entry(part_of(stage, values), tuple(values)) for values in looks.values())


def _entry(part: ProgramGraph, names: tuple[str, ...]) -> LaterEntry:
    marked = {what: [n for n in part.graph.nodes if n.meta.get("of_attention") == what] for what in _WHAT}
    sizes = {what: sum(_bytes(node, part.hints) for node in nodes) for what, nodes in marked.items()}
    what = next((what for what in _WHAT if marked[what]), "")
    return LaterEntry(names, what, sizes.get(what, 0), _multiplications(part))


_WHAT = "weights", "scores"


def _extents(node: fx.Node, hints: dict[str, int]) -> list[int]:
    return [int(evaluate_size(size_expression(n), hints)) for n in node.meta["val"].shape]


def _bytes(node: fx.Node, hints: dict[str, int]) -> int:
    value = node.meta["val"]
    return torch.Size(_extents(node, hints)).numel() * int(value.dtype.itemsize)


def _multiplications(part: ProgramGraph) -> int:
    """Those of its products, as torch counts them, at the sizes of the first call."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
    ):
        inputs = (node for node in part.placeholders())
        part.module(
            *(
                torch.empty(_extents(n, part.hints), dtype=n.meta["val"].dtype, device=n.meta["val"].device)
                for n in inputs
            )
        )
    return int(counter.get_total_flops()) // 2
