"""A model on whole sequences as a module that torch.export can trace again: attngraph's operations replaced.

The module is called as the model was in the example call, without the arguments that hold no tensor.

Where tokens are sorted by their expert (mixtures of experts), how many each gets is known when the program
runs only. ONNX has no product for that, and the operation of a library such as transformers is not there
where the library is not. So every expert multiplies all tokens, and a token takes the product of its own: as
exact, and as many times the work as there are experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from attngraph.capture.captured import Captured
from attngraph.capture.structure import flatten, unflatten
from attngraph.errors import ExportError
from attngraph.exporter.lower import Lowering, Operands
from attngraph.exporter.tracing import Limits
from attngraph.ir.graph.program_graph import RESULTS, Input, ProgramGraph, Rate, is_assertion, is_random
from attngraph.ir.ops import nodes
from attngraph.meaning.placement.elements import grouped
from attngraph.runtime.machine import own_tensor
from attngraph.runtime.verify import tensors_of
from attngraph.saved.weights import put

REMARK = "products of tokens with the weights of their expert: every expert multiplies all tokens"


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
        return self.lowering.attention(self.title(), found.program, operands)[0], None


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
        self._places = {
            str(extent): (number, dim)
            for number, shape in enumerate(captured.shapes)
            for dim, extent in enumerate(shape)
            if getattr(extent, "is_Symbol", False)
        }
        known = {size: f"{names[n]}.shape[{dim}]" for size, (n, dim) in self._places.items()}
        self.limits = Limits(captured.graph.conditions, known, captured.sides)
        self._order, self.outputs = _results(captured)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = {name: kwargs[name] for name in self._kwargs}
        tensors = tensors_of((args, named))
        if self.limits.conditions:
            sizes = {name: tensors[n].shape[dim] for name, (n, dim) in self._places.items()}
            tensors[0] = self.limits.checked(tensors[0], sizes, self._lowering.format)
        given = [self.weights[i] if i in self.weights else tensors[int(i.name)] for i in self._graph.inputs]
        self._lowering.begin()
        made = Rewritten(self._graph, self._lowering).run(*given)
        kinds = [o.kind for o in self._graph.outputs]
        values = [v for v, kind in zip(made, kinds, strict=True) if kind in RESULTS]
        results = tuple(values[place] for place in self._order)
        return results[0] if len(results) == 1 else results


def _results(captured: Captured) -> tuple[list[int], list[str]]:
    """Which of the graph's values are the model's results, in order, and their names."""
    structure = captured.structure
    places = [value for kind, value in structure.leaves if kind == "tensor"]
    if not places:
        raise ExportError("the model returns no tensor.")
    try:
        result = unflatten([kind == "tensor" for kind, _ in structure.leaves], structure.tree)
    except Exception:
        result = None
    if isinstance(result, Mapping):
        names = [
            name if len(own) == 1 else f"{name}.{number}"
            for name, value in result.items()
            for own in [[leaf for leaf in flatten(value)[0] if leaf is True]]
            for number, _ in enumerate(own)
        ]
        if len(names) == len(places):
            return places, names
    return places, ["output"] if len(places) == 1 else [f"output.{n}" for n in range(len(places))]


class Weights(nn.Module):
    """Parameters, buffers and constants of a graph, looked up by its inputs."""

    def __init__(self, graph: ProgramGraph, owner: nn.Module) -> None:
        super().__init__()
        self._paths: dict[Input, str] = {}
        known: dict[int, nn.Parameter] = {}
        for given in graph.inputs:
            if given.kind in ("parameter", "buffer", "constant"):
                value = own_tensor(given, owner, graph.constants)(None)
                tensor = value.detach()
                if given.kind == "parameter":
                    tensor = known.setdefault(id(value), nn.Parameter(tensor, requires_grad=False))
                self._keep(given, tensor)
        stage = graph.stages.get(Rate.WEIGHTS)
        if stage is not None:
            inputs = [own_tensor(given, owner, stage.constants)(None) for given in stage.inputs]
            with torch.no_grad():
                made = stage.module(*inputs)
            for output, value in zip(stage.outputs, made, strict=True):
                self._keep(Input(Rate.WEIGHTS.value, output.name), value.detach())

    def _keep(self, given: Input, tensor: Tensor) -> None:
        """Register a tensor below modules with the names that the user knows."""
        kind = "" if given.kind in ("parameter", "buffer") else f"{given.kind}."
        name = ".".join(_free(step) for step in f"{kind}{given.label}".split("."))
        put(self, name, tensor)
        self._paths[given] = name

    def __getitem__(self, given: Input) -> Tensor:
        path, _, name = self._paths[given].rpartition(".")
        found: Tensor = getattr(self.get_submodule(path), name)
        return found

    def __contains__(self, given: object) -> bool:
        return given in self._paths


def _free(name: str) -> str:
    """The name, or one like it if every module has an attribute of that name (`training`, say)."""
    return f"{name}_" if hasattr(nn.Module, name) or name == "training" else name


def by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x[t] @ weight[expert of t]`; zero for tokens behind those of the last expert. `x` is `[tokens, D]`,
    sorted by expert, `weight` `[experts, D, H]`, and `ends` `[experts]`: where each expert's tokens end."""
    place = torch.arange(x.shape[0], device=x.device)
    expert = (place[:, None] >= ends).sum(-1, keepdim=True)
    found = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)
    for number in range(weight.shape[0]):
        found = torch.where(expert == number, x @ weight[number], found)
    return found
