"""A lowered program graph with everything that a call needs: tensors fed in order, writes copied back,
results put together again."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.guards import ShapeGuard, ValueGuard, size_value
from attngraph.capture.structure import unflatten
from attngraph.capture.trace import Captured
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.report.report import CompileReport
from attngraph.runtime.ahead import Ahead, Fetch


class Executable:
    """One traced graph, ready to be called.

    Args:
        captured: the graph (lowered by now), its structure and its conditions.
        owner: the module whose parameters and buffers the graph's inputs name.
        run: what computes the graph's results from its inputs (the graph itself, or compiled further).
    """

    def __init__(
        self, captured: Captured, owner: nn.Module, run: Callable[..., Sequence[Any]], report: CompileReport
    ) -> None:
        self.captured, self.report, self._run = captured, report, run
        self.graph = captured.graph
        self.sizes = ShapeGuard(captured.shapes, captured.graph.conditions)
        self.ahead = ahead_of(self.graph, owner)
        self._fetch = [
            _ahead(self.ahead, given.name) if self.ahead is not None and given.kind == "ahead"
            else fetcher(given, owner, self.graph.constants) for given in self.graph.inputs
        ]  # fmt: skip
        known = dict(zip((p.name for p in self.graph.placeholders()), self._fetch, strict=True))
        self._assumed = [known[n] for n in sorted(self.graph.assumed)]
        self._values = ValueGuard([fetch([]) for fetch in self._assumed])
        written = {(o.kind, o.name) for o in self.graph.outputs if o.kind != "value"}
        self._overwritten = {n for n, i in enumerate(self.graph.inputs) if (i.kind, i.name) in written}
        self._write = [_writer(output, owner) for output in self.graph.outputs]

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph serves a call with these tensors (of the dtypes it was traced for)."""
        if self.sizes.bind(tuple(t.shape for t in tensors)) is None:
            return False
        return self._values.holds([fetch([]) for fetch in self._assumed])

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if self.ahead is not None:
            self.ahead.values()
        inputs = [fetch(tensors) for fetch in self._fetch]
        if self._overwritten and torch.is_grad_enabled():
            # The backward pass needs them as they were.
            inputs = [t.clone() if n in self._overwritten else t for n, t in enumerate(inputs)]
        with contextlib.ExitStack() as stack:
            for device in {t.device.type for t in inputs}:
                # The casts that autocast made are in the graph already.
                if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            results = self._run(*inputs)
        values: list[Any] = []
        laid: dict[int, Tensor] = {}  # what is returned twice stays one tensor
        for result, write, output in zip(results, self._write, self.graph.outputs, strict=True):
            if write is None:
                if id(result) not in laid:
                    laid[id(result)] = _laid_out(result, output.order)
                values.append(laid[id(result)])
            else:
                write(tensors, result)
        return self._assemble(values, tensors)

    def _assemble(self, values: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        leaves: list[Any] = []
        sizes = self.sizes.bind(tuple(t.shape for t in tensors)) or {}
        for kind, value in self.captured.structure.leaves:
            if kind == "tensor":
                leaves.append(values[value])
            else:
                leaves.append(
                    size_value(value, sizes) if kind == "size" and hasattr(value, "free_symbols") else value
                )
        return unflatten(leaves, self.captured.structure.tree)


def _laid_out(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The tensor with its dimensions in this order in memory; itself if it is so already."""
    if not order:
        return tensor
    dense = tensor.permute(order)
    if dense.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return dense.contiguous().permute(inverse)


def ahead_of(graph: ProgramGraph, owner: nn.Module) -> Ahead | None:
    """The values of weights alone that a graph takes, if it takes some."""
    if graph.ahead is None:
        return None
    return Ahead(graph.ahead, [fetcher(given, owner, graph.constants) for given in graph.ahead.inputs])


def _ahead(ahead: Ahead, name: str) -> Fetch:
    return lambda _: ahead.current[name]


def fetcher(given: Any, owner: nn.Module, constants: dict[str, Tensor]) -> Fetch:
    """How an input is obtained at call time. Weights are looked up anew each time: the user may have
    moved, replaced or retyped them."""
    if given.kind == "argument":
        return operator.itemgetter(int(given.name))
    if given.kind == "constant":
        constant = constants[given.name]
        return lambda _: constant
    path, _, name = given.name.rpartition(".")
    module = owner.get_submodule(path)
    store = module._parameters if given.kind == "parameter" else module._buffers

    def fetch(_: Sequence[Tensor]) -> Tensor:
        tensor = store.get(name)
        return getattr(module, name) if tensor is None else tensor  # type: ignore[no-any-return]

    return fetch


def _writer(output: Any, owner: nn.Module) -> Callable[[Sequence[Tensor], Tensor], None] | None:
    """How a result that is a write reaches its tensor; None for values."""
    if output.kind == "value":
        return None
    if output.kind == "argument":
        return lambda tensors, value: _overwrite(tensors[int(output.name)], value)
    path, _, name = output.name.rpartition(".")
    module = owner.get_submodule(path)
    return lambda _, value: _overwrite(module.get_buffer(name), value)


def _overwrite(target: Tensor, value: Tensor) -> None:
    if target.requires_grad and target.is_leaf:
        with torch.no_grad():
            target.copy_(value)
    else:
        target.copy_(value)
