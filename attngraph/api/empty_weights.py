"""Building a model without memory for its weights, whose shapes alone are of interest.

Uninitialised tensors (`torch.empty`, from which modules make their weights) are made without memory. What a
model computes while it is built (positions, masks) has its contents, because masks are derived from it.
Parameters then become zeros that the system gives memory to when they are written to, which nobody does, so
that nothing but their values is different from the model's.
"""

from __future__ import annotations

import mmap
import sys
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


_RESERVES_NOTHING = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _zeros(parameter: Tensor) -> Tensor:
    """Zeros of a parameter's shape, whose pages nobody has written to and which so take no memory."""
    count = parameter.numel() * parameter.itemsize
    if not (_RESERVES_NOTHING and count):
        return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    room = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _RESERVES_NOTHING)
    return torch.frombuffer(room, dtype=parameter.dtype).view(parameter.shape)


def fill(model: nn.Module, inputs: Any) -> bool:
    """Let parameters without memory be zeros that take none, in place; whether the model and its inputs then
    have all other contents."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(_zeros(parameter), parameter.requires_grad)
            module._parameters[name] = made[parameter]
    return not any(tensor.is_meta for tensor in _others(model, inputs))


def _others(model: nn.Module, inputs: Any) -> Iterator[Tensor]:
    """Tensors that are no parameters: of modules' buffers and attributes, and inputs."""
    leaves = [*torch.utils._pytree.tree_leaves(inputs), *model.buffers()]
    for module in model.modules():
        own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules", "_buffers")}
        leaves += torch.utils._pytree.tree_leaves(own)
    yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))
