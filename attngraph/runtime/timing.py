"""Measures what each operation of a compiled model's graph takes: the graph is interpreted, node by node.

Every node is timed by itself, so nothing overlaps and nothing is compiled together: the sum may be more than
a call takes. Used by `compiled.times` for people who look where the time goes; nothing else depends on it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import op_name
from attngraph.ir.graph.source import module_of, source_of
from attngraph.ir.ops import nodes
from attngraph.report.times import OpTime, Times
from attngraph.runtime.executable import Executable


def times_of(executable: Executable, tensors: Sequence[Tensor], rounds: int) -> Times:
    """What the operations take in a call with these tensors, after one call to warm up."""
    spent: dict[fx.Node, list[float]] = {}

    def interpreter(module: fx.GraphModule) -> fx.Interpreter:
        graph = executable.captured.graph
        return _Timed(module, spent) if module.graph is graph.graph else fx.Interpreter(module)

    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(devices):
        executable.machine(tensors, interpret=interpreter)
        spent.clear()
        for _ in range(rounds):
            executable.machine(tensors, interpret=interpreter)
    return Times(tuple(_told(node, statistics.median(s)) for node, s in spent.items()), rounds)


def _told(node: fx.Node, seconds: float) -> OpTime:
    found = nodes.view(node)
    kernel = getattr(found, "kernel", "") or ("chosen at each call" if found is not None else "")
    return OpTime(op_name(node), module_of(node), source_of(node), seconds, kernel)


class _Timed(fx.Interpreter):
    """Runs a graph and notes what each operation took."""

    def __init__(self, module: fx.GraphModule, spent: dict[fx.Node, list[float]]) -> None:
        super().__init__(module)
        self.spent = spent

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function":
            return super().run_node(node)
        _wait()
        start = time.perf_counter()
        found = super().run_node(node)
        _wait()
        self.spent.setdefault(node, []).append(time.perf_counter() - start)
        return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
