"""A traced graph that can be called: which calls it accepts, and how their results are rebuilt."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch import Tensor, nn
from torch.utils._sympy.symbol import SymT, symbol_is_type

from attngraph.capture.attributes import at, holder, holder_of
from attngraph.capture.captured import Captured, Structure
from attngraph.capture.guards import ShapeGuard, size_value
from attngraph.capture.structure import unflatten
from attngraph.ir.graph.program_graph import RESULTS, ProgramGraph, Rate, is_assertion
from attngraph.ir.ops.others import laid_out
from attngraph.report.report import CompileReport
from attngraph.runtime.looks import Looks
from attngraph.runtime.machine import Machine, Run, change

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Executable:
    """One traced graph, with the calling convention of the function that was traced.

    Args:
        captured: the graph, its structure and its conditions.
        owner, run: as for `Machine`.
        state: gives the inputs that are neither the call's nor the model's (a rank's parts of parameters).

    Attributes:
        report: what was done to the graph; set once it is known.
        scores: the mean number of scores of an attention in a call; None if not counted.
        asserts: whether a call may fail because of a condition on values that the model asserts.
        traced: what its trace depended on, for saving it. scope: what of the state around a call it does.
    """

    __slots__ = (
        "asserts", "captured", "looks", "machine", "report", "scope", "scores", "sizes", "state", "traced",
    )  # fmt: skip

    def __init__(
        self, captured: Captured, owner: nn.Module, run: Callable[[ProgramGraph], Run] | None = None,
        state: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self.captured, self.report, self.scope = captured, CompileReport(), captured.scope
        self.traced: Any = None
        self.sizes = ShapeGuard(captured.shapes, captured.graph.conditions)
        scores = scores_per_attention(captured.graph, self.sizes)
        self.scores = None if captured.serves_small else scores
        self.asserts = bool(captured.checks) or any(map(is_assertion, captured.graph.graph.nodes))
        self.machine = Machine(captured.graph, owner, run)
        stage = captured.graph.stages.get(Rate.LOOK)
        self.looks = None if stage is None else Looks(stage, owner)
        self.state = state

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph accepts a call with these tensors (of the dtypes that it was traced for)."""
        return self.fits(tensors) and self.machine.is_valid()

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph accepts these sizes."""
        return self._sizes(tensors) is not None

    def __call__(self, tensors: Sequence[Tensor], given: Arguments = ((), {})) -> Any:
        """The call's result, once what forward sets is set: in the model, and in objects that are `given`."""
        writes: list[tuple[Tensor, Tensor]] = []
        run = functools.partial(self.machine, tensors, self.state(), later=writes)
        waiting: list[Tensor] = []
        if self.looks is None:
            results: Sequence[Any] = run()
        else:
            names = [o.name if o.kind == Rate.LOOK.value else "" for o in self.captured.graph.outputs]
            results, waiting = self.looks.run(run, names, self._sizes(tensors) or {})
        values: list[Any] = []
        laid: dict[int, Tensor] = {}  # a tensor that is returned twice stays one tensor
        for result, output in zip(results, self.captured.graph.outputs, strict=True):
            if output.kind in RESULTS:
                if id(result) not in laid:
                    laid[id(result)] = laid_out(result, output.order)
                values.append(laid[id(result)])
        for place, value in zip(self.looks.places if self.looks else (), waiting, strict=True):
            values.insert(place, value)

        def assembled(structure: Structure) -> Any:
            leaves: list[Any] = []
            for kind, value in structure.leaves:
                if kind == "tensor":
                    leaves.append(values[value])
                elif kind == "argument":
                    leaves.append(tensors[value])
                elif kind == "given":
                    leaves.append(at(*given, value))
                elif kind == "size" and hasattr(value, "free_symbols"):
                    leaves.append(size_value(value, self._sizes(tensors) or {}))
                else:
                    leaves.append(value)
            return unflatten(leaves, structure.tree)

        result = assembled(self.captured.structure)
        attributes: list[tuple[Any, Any, Any]] = []
        for attribute in self.captured.attributes:
            value = result if attribute.structure is None else assembled(attribute.structure)
            attributes.append((holder_of(attribute.owner, attribute.name), attribute.name, value))
        for one in self.captured.changes:
            attributes.append((holder(*given, one.path), one.key, assembled(one.structure)))
        change(writes, attributes)
        return result

    def _sizes(self, tensors: Sequence[Tensor]) -> dict[str, int] | None:
        return self.sizes.bind(tuple(t.shape for t in tensors))


def scores_per_attention(
    graph: ProgramGraph, sizes: ShapeGuard
) -> Callable[[Sequence[Tensor]], float] | None:
    """The function that gives, for a call's tensors, the mean number of scores (queries times keys, of all
    heads and rows) of the graph's attentions; 0 without any. None for graphs that are not on the CPU, where
    this was not measured, and where only data tell how many there are."""
    inputs = (node.meta.get("val") for node in graph.placeholders())
    if any(isinstance(t, Tensor) and t.device.type != "cpu" for t in inputs):
        return None
    counts, attentions = [], 0
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") != "attngraph" or len(node.args) < 2:
            continue
        q, k = (getattr(a, "meta", {}).get("val") for a in node.args[:2])
        if not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.ndim != 4 or k.ndim != 4:
            continue
        attentions += 1
        counts.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
    total = sympy.Add(*(c if isinstance(c, int) else c.node.expr for c in counts))
    if any(symbol_is_type(s, SymT.UNBACKED_INT) for s in total.free_symbols):
        return None

    @functools.cache
    def mean(bound: tuple[tuple[str, int], ...]) -> float:
        return float(size_value(total, dict(bound)) / max(attentions, 1))

    return lambda tensors: mean(tuple((sizes.bind(tuple(t.shape for t in tensors)) or {}).items()))
