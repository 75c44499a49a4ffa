"""A model on whole sequences as a module that torch.export can trace again: attngraph's operations replaced.

The module is called as the model was in the example call, without the arguments that hold no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from attngraph.capture.captured import Captured
from attngraph.capture.structure import flatten, unflatten
from attngraph.errors import ExportError
from attngraph.exporter.experts import by_expert
from attngraph.exporter.limits import Limits
from attngraph.exporter.lower import Lowering, Operands
from attngraph.exporter.weights import Weights
from attngraph.ir.graph.program_graph import RESULTS, ProgramGraph, is_assertion, is_random
from attngraph.ir.ops import nodes
from attngraph.meaning.placement.elements import grouped


class Rewritten(fx.Interpreter):
    """Runs a graph with its attentions as the lowering writes them."""

    def __init__(self, graph: ProgramGraph, lowering: Lowering) -> None:
        super().__init__(graph.module)
        self.lowering, self.node = lowering, graph.graph.output_node()
        self.extra_traceback = False  # our errors are for users, who do not know these nodes

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        if is_assertion(n):
            return None  # what a model checks of its arguments is no part of an exported program
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = nodes.called(target, args, kwargs)
        if found is not None:
            return self.attention(found)
        if grouped(self.node) is not None:
            self.lowering.by_expert = True
            return by_expert(args[0], args[1], kwargs["offs"] if "offs" in kwargs else args[2])
        if is_random(target, args):
            raise ExportError(
                "the model draws random numbers (dropout, say), which an exported program does not do.\n"
                "What to do: call model.eval() first."
            )
        if getattr(target, "namespace", "") == "attngraph":
            raise ExportError(f"{target.__name__} has no counterpart in torch or ONNX.")
        return super().call_function(target, args, kwargs)

    def title(self) -> str:
        """The current attention's name in the model."""
        about = self.node.meta.get("attention")
        return "attention" if about is None or not about.name else about.name

    def attention(self, found: nodes.AttentionOp) -> Any:
        if not isinstance(found, nodes.Attention):
            raise ExportError(f"{type(found).__name__} has no counterpart in torch or ONNX.")
        operands = Operands(found.q, found.k, found.v, found.reads, found.sizes)
        return self.lowering.attention(self.title(), found.program, operands).out, None


class Whole(nn.Module):
    """The module. `inputs`: the names of its tensors, `outputs`: of its results."""

    def __init__(
        self, captured: Captured, owner: nn.Module, lowering: Lowering, names: Sequence[str],
        kwargs: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__()
        written = [o for o in captured.graph.outputs if o.kind in ("buffer", "argument")]
        if written:
            raise ExportError(
                f"the model writes to a {written[0].kind} ({written[0].name}) in its forward, which an "
                "exported program does not do."
            )
        self._graph, self._lowering, self._kwargs = captured.graph, lowering, list(kwargs)
        self.weights = Weights(captured.graph, owner)
        self.inputs = list(names)
        self._places = _places_of_sizes(captured)
        known = {size: f"{names[n]}.shape[{dim}]" for size, (n, dim) in self._places.items()}
        self.limits = Limits(captured.graph.conditions, known, captured.sides)
        self._order, self.outputs = _results(captured)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = {name: kwargs[name] for name in self._kwargs}
        tensors = [leaf for leaf in flatten((args, named))[0] if isinstance(leaf, Tensor)]
        tensors = self._checked(tensors)
        given = [self.weights[i] if i in self.weights else tensors[int(i.name)] for i in self._graph.inputs]
        self._lowering.begin()
        made = Rewritten(self._graph, self._lowering).run(*given)
        kinds = [o.kind for o in self._graph.outputs]
        values = [v for v, kind in zip(made, kinds, strict=True) if kind in RESULTS]
        results = tuple(values[place] for place in self._order)
        return results[0] if len(results) == 1 else results

    def _checked(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of a call, if its sizes are among those that the program is for."""
        if not self.limits.conditions:
            return tensors
        sizes = {name: tensors[n].shape[dim] for name, (n, dim) in self._places.items()}
        holds = self.limits.hold(sizes, tensors[0].device)
        return [self.limits.checked(tensors[0], holds, self._lowering.in_onnx), *tensors[1:]]


def _places_of_sizes(captured: Captured) -> dict[str, tuple[int, int]]:
    """Which dimension of which tensor has a symbolic size by itself."""
    return {
        str(extent): (number, dim)
        for number, shape in enumerate(captured.shapes)
        for dim, extent in enumerate(shape)
        if getattr(extent, "is_Symbol", False)
    }


def _results(captured: Captured) -> tuple[list[int], list[str]]:
    """Which of the graph's values are the model's results, in order, and their names."""
    structure = captured.structure
    places = [value for kind, value in structure.leaves if kind == "tensor"]
    if not places:
        raise ExportError("the model returns no tensor.")
    marks = [(value,) if kind == "tensor" else None for kind, value in structure.leaves]
    try:
        result = unflatten([_Mark(m[0]) if m else None for m in marks], structure.tree)
    except Exception:
        result = None
    if isinstance(result, Mapping):
        names = [
            name if len(own) == 1 else f"{name}.{number}"
            for name, value in result.items()
            for own in [[leaf for leaf in flatten(value)[0] if isinstance(leaf, _Mark)]]
            for number, _ in enumerate(own)
        ]
        if len(names) == len(places):
            return places, names
    return places, ["output"] if len(places) == 1 else [f"output.{n}" for n in range(len(places))]


class _Mark:
    def __init__(self, place: int) -> None:
        self.place = place
