"""What a forward may branch on besides its arguments: the state of the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_SIMPLE = (int, float, bool, str, bytes, type(None))
_TORCHS_OWN = (frozenset(vars(nn.Module())) | {"_is_torch_compile"}) - {"training"}


def model_state(model: nn.Module) -> tuple[Any, ...]:
    """Training flags, the metadata of weights, and the plain attributes that a forward may branch on,
    those of configuration objects included."""
    found: list[Any] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, value in vars(module).items():
            if name in _TORCHS_OWN:
                continue
            if isinstance(value, _SIMPLE):
                found.append(value)
            elif name[0] != "_" and not isinstance(value, (Tensor, nn.Module)) and id(value) not in seen:
                seen.add(id(value))
                fields = getattr(value, "__dict__", None)
                if fields:
                    found.append(tuple(v for v in fields.values() if isinstance(v, _SIMPLE)))
        for store in (module._parameters, module._buffers):
            for tensor in store.values():
                found.append(None if tensor is None else (tensor.dtype, tensor.device, tensor.shape))
    return tuple(found)
