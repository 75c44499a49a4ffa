"""Canonicalize: take out what computes nothing.

Matches assertions about metadata, contiguity and aliasing markers, and, in graphs through which no
gradient flows, `detach`. Each is the identity on values there. What nothing uses goes as well. A
`view`, which is only possible for some strides, becomes a `reshape`, which has the same elements for
any: a later pass may then change how a value lies in memory. For the same reason a copy made only to
be contiguous becomes `contiguous`, which copies nothing where there is nothing to do. Refuses nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch

from attngraph.ir.graph import Level, ProgramGraph, memory_of, op_name
from attngraph.pipeline import Outcome

_IDENTITY = ("aten.alias.", "aten.lift_fresh.", "aten.lift_fresh_copy.")
_STRIDED_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
_ASSERTIONS = ("aten._assert_tensor_metadata.",)


@dataclasses.dataclass(frozen=True)
class Canonicalize:
    name: str = "canonicalize"
    requires: Level = Level.CAPTURED
    yields: Level = Level.CANONICAL

    def run(self, graph: ProgramGraph) -> Outcome:
        removed: Counter[str] = Counter()
        for node in list(graph.graph.nodes):
            target = str(node.target)
            if node.op != "call_function":
                continue
            if target.startswith(_ASSERTIONS):
                removed[op_name(node)] += 1
                graph.graph.erase_node(node)
            elif target.startswith(_IDENTITY) or (target.startswith("aten.detach.") and not graph.gradients):
                removed[op_name(node)] += 1
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
            elif (
                target == "aten.clone.default" and node.kwargs.get("memory_format") is torch.contiguous_format
            ):
                if memory_of(node.args[0]).op != "placeholder":
                    node.target, node.kwargs = torch.ops.aten.contiguous.default, {}
            elif target in _STRIDED_VIEWS:
                node.target = torch.ops.aten.reshape.default
        return Outcome([f"removed {count} x {name}" for name, count in sorted(removed.items())])
