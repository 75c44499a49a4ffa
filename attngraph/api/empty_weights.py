"""Building a model without memory for its weights, whose shapes alone are of interest.

Uninitialised tensors (`torch.empty`, from which modules make their weights) are made without memory. What a
model computes while it is built (positions, masks) has its contents, because masks are derived from it.
Parameters then become views of one zero, so that nothing but their values is different from the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class WithoutMemory(TorchFunctionMode):
    """A context in which `torch.empty` gives tensors without memory, where no device is named."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if function is torch.empty and given.get("device") is None and "out" not in given:
            given["device"] = "meta"
        return function(*args, **given)


def fill(model: nn.Module, inputs: Any) -> bool:
    """Let parameters without memory be views of one zero, in place; whether the model and its inputs then
    have all other contents."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                zero = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                made[parameter] = nn.Parameter(zero, parameter.requires_grad)
            module._parameters[name] = made[parameter]
    return not any(tensor.is_meta for tensor in _others(model, inputs))


def _others(model: nn.Module, inputs: Any) -> Iterator[Tensor]:
    """Tensors that are no parameters: of modules' buffers and attributes, and inputs."""
    leaves = [*torch.utils._pytree.tree_leaves(inputs), *model.buffers()]
    for module in model.modules():
        own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules", "_buffers")}
        leaves += torch.utils._pytree.tree_leaves(own)
    yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))
