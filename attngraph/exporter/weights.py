"""The tensors of a model as attributes of a module with the model's own names for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attngraph.ir.graph.program_graph import Input, ProgramGraph, Rate
from attngraph.runtime.inputs import own_tensor

OWN = ("parameter", "buffer", "constant")


class Weights(nn.Module):
    """Parameters, buffers and constants of a graph, looked up by its inputs."""

    def __init__(self, graph: ProgramGraph, owner: nn.Module) -> None:
        super().__init__()
        self._paths: dict[Input, tuple[str, str]] = {}
        known: dict[int, nn.Parameter] = {}
        for given in graph.inputs:
            if given.kind in OWN:
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
        *path, name = (_free(step) for step in f"{kind}{given.label}".split("."))
        module: nn.Module = self
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
        self._paths[given] = (".".join(path), name)

    def __getitem__(self, given: Input) -> Tensor:
        path, name = self._paths[given]
        found: Tensor = getattr(self.get_submodule(path), name)
        return found

    def __contains__(self, given: object) -> bool:
        return given in self._paths


def _free(name: str) -> str:
    """The name, or one like it if every module has an attribute of that name (`training`, say)."""
    return f"{name}_" if hasattr(nn.Module, name) or name == "training" else name
