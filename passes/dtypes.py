"""Operands that give an operation only a dtype and a device are replaced by these.

`x.new_zeros(...)` and `y.type_as(x)` would keep all of x alive where ranks have parts of it, and seem to read
all tokens of x where a decoder is derived.
"""

from __future__ import annotations

from typing import Any

import torch

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.passes.build import Builder

aten = torch.ops.aten
_NEW = {
    aten.new_empty.default: aten.empty.memory_format, aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default, aten.new_full.default: aten.full.default,
}  # fmt: skip
_CONVERTED = (aten.type_as.default, aten.to.other)


def forget_operands_of_dtype(graph: ProgramGraph) -> None:
    """Replace operands that are used for their dtype and device alone."""
    for node in list(graph.graph.nodes):
        if node.target not in _NEW and node.target not in _CONVERTED:
            continue
        args: Any = node.args
        value, builder = node.meta["val"], Builder(graph, node)
        about = {"dtype": value.dtype, "device": value.device}
        if node.target in _NEW:
            given = {k: v for k, v in node.kwargs.items() if v is not None}
            made = builder.call(_NEW[node.target], *args[1:], **{**given, **about})
        elif args[0].meta["val"].dtype == value.dtype and args[0].meta["val"].device == value.device:
            made = args[0]
        else:
            made = builder.call(aten._to_copy.default, args[0], **about)
        node.replace_all_uses_with(made)
    graph.clean()
