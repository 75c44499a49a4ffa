"""Captures in pieces a model that cannot be captured whole.

torch.compile can capture models with data-dependent Python that torch.export cannot. It calls our backend
with each graph between two graph breaks, and each is compiled as a separate model. The report says where and
why the model could not be captured whole.
"""

import dataclasses
import logging
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from attngraph.capture.instead import silenced
from attngraph.capture.subgraphs import function_refusal
from attngraph.errors import CaptureError
from attngraph.report import report as reporting
from attngraph.report.entries import Break
from attngraph.report.report import CompileReport

log = logging.getLogger(__name__)


class Compiled(Protocol):
    """The interface of a compiled module (`compiled.CompiledModule`)."""

    @property
    def report(self) -> CompileReport: ...

    def __call__(self, *args: Any) -> Any: ...


Compile = Callable[[nn.Module], Compiled]


class GraphBreaks:
    """`target` captured in pieces, each compiled by `compile_part`; `problem` is the reason. It runs as it is
    where pieces would be wrong too."""

    def __init__(self, target: Callable[..., Any], compile_part: Compile, problem: CaptureError) -> None:
        self.target = target
        self.problem = problem
        alone = "" if problem.splits else "; the model runs as it is"
        self.breaks = [Break(problem.reason + alone, problem.source)]
        self.parts: list[PartialGraph] = []

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            refused = {n: refusal for n in module.graph.nodes if (refusal := function_refusal(n))}
            if refused:
                return self._around(module, refused, compile_part)
            return self._part(module, compile_part)

        self.run: Callable[..., Any] = torch.compile(target, backend=backend) if problem.splits else target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            # Torch logs an operation that cannot be traced: an invalid call raises an error anyway.
            with silenced("torch._subclasses.fake_tensor"):
                return self.run(*args, **kwargs)
        except Exception as problem:
            frames = traceback.extract_tb(problem.__traceback__)
            own = isinstance(problem, torch._dynamo.exc.TorchDynamoException)
            if not own and not (frames and frames[-1].filename.startswith(_TORCHS)):
                raise  # it is a failure of the model, not of torch.compile
            # An invalid call fails in eager mode too, with a clearer error. If eager succeeds, warn.
            result = self.target(*args, **kwargs)
            told = next(iter(str(problem).splitlines()), "") or type(problem).__name__
            self.breaks.append(Break(f"torch.compile cannot capture it either: {told}; it runs eagerly", ""))
            log.warning("%s", self.breaks[-1].reason)
            self.run = self.target
            return result

    def _around(
        self, module: fx.GraphModule, refused: Mapping[fx.Node, CaptureError], compile_part: Compile
    ) -> Callable[..., Any]:
        """The graph with what is before, between and after some of its nodes compiled."""
        stops = dict.fromkeys(Break(why.reason, why.source) for why in refused.values())
        self.breaks += [stop for stop in stops if stop not in self.breaks]
        number, numbers = 0, dict[fx.Node, int]()
        for node in module.graph.nodes:  # some are parts of their own
            number += node in refused
            numbers[node] = number
            number += node in refused
        try:
            whole = split_module(module, module, numbers.__getitem__, keep_original_order=True)
        except Exception:  # torch cannot divide a graph with sizes that only data know
            return module
        left = {node.target for node in refused}
        for name, part in [*whole.named_children()]:
            if isinstance(part, fx.GraphModule) and left.isdisjoint(n.target for n in part.graph.nodes):
                delattr(whole, name)
                setattr(whole, name, self._part(part, compile_part, name))
        run: Callable[..., Any] = torch._dynamo.disable(whole)  # type: ignore[no-untyped-call]
        return run

    def _part(self, module: fx.GraphModule, compile_part: Compile, name: str = "") -> "PartialGraph":
        now = torch._guards.CompileContext.current_compile_id()
        place = object() if now is None else (now.frame_id, now.compiled_autograd_id)  # in the user's code
        self.parts.append(PartialGraph(module, compile_part, (place, name)))
        return self.parts[-1]

    def report(self) -> CompileReport:
        stops = [*self.breaks, *(Break(p.problem.reason, p.problem.source) for p in self.parts if p.problem)]
        graphs = sum(part.compiled.report.graphs for part in self.parts)
        # torch.compile captures a piece again for other sizes; the latest capture of each is reported.
        latest = {part.place: part for part in self.parts}
        found = reporting.merge([part.compiled.report for part in latest.values()])
        return dataclasses.replace(found, breaks=(*stops, *found.breaks), graphs=max(graphs, 1))


_TORCHS = os.path.dirname(torch._dynamo.__file__) + os.sep, torch._ops.__file__


class PartialGraph:
    """One of torch.compile's graphs as a callable. torch.compile passes sizes among the tensors; here they
    are computed from the tensors instead, so that they stay dynamic."""

    def __init__(self, module: fx.GraphModule, compile_part: Compile, place: object = None) -> None:
        self.place = place
        # torch.compile still uses its graph, so ours is a copy.
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        self.module = fx.GraphModule(module, graph)
        self.kept = _sizes_from_tensors(self.module)
        self.compiled = compile_part(_Interpreted(self.module))
        self.problem: CaptureError | None = None
        self.__name__ = "attngraph_piece"

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> Any:
        kept = [a for a, keep in zip(args, self.kept, strict=True) if keep]
        if self.problem is None:
            try:
                return self.compiled(*kept)
            except CaptureError as problem:
                log.warning("a piece runs as it is: %s", problem)
                self.problem = problem
        return self.module(*kept)


class _Interpreted(nn.Module):
    """A graph run node by node, so that a trace of it keeps the lines of the user's code."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(self.module).run(*args)


def _sizes_from_tensors(module: fx.GraphModule) -> list[bool]:
    """Replace size inputs by size queries on tensor inputs. Returns for each input whether it remains."""
    graph = module.graph
    inputs = {n: n.meta.get("example_value", n.meta.get("val")) for n in graph.find_nodes(op="placeholder")}
    kept: list[bool] = []
    found: dict[str, tuple[fx.Node, int]] = {}
    for node, value in inputs.items():
        for axis, extent in enumerate(getattr(value, "shape", ())):
            if isinstance(extent, torch.SymInt) and extent.node.expr.is_Symbol:
                found.setdefault(str(extent.node.expr), (node, axis))
    last = next(reversed(inputs), None)
    for node, value in inputs.items():
        source = found.get(str(value.node.expr)) if isinstance(value, torch.SymInt) else None
        kept.append(source is None)
        if source is not None and last is not None:
            with graph.inserting_after(last):
                size = graph.call_method("size", source)
            node.replace_all_uses_with(size)
            graph.erase_node(node)
            last = size if node is last else last
    module.recompile()
    return kept
