"""What torch computes from integers and Python numbers alone has its default dtype; here it has another.

The default dtype is the whole process's, so it is not changed: integers are converted before, or the dtype is
given. Where results are compared in float64, positions are such integers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def is_of_integers(args: Any) -> bool:
    """Whether no tensor among the arguments has floating numbers."""
    tensors = (a for a in pytree.tree_leaves(args) if isinstance(a, Tensor))
    return not any(t.is_floating_point() or t.is_complex() for t in tensors)


def from_integers(target: Any, args: list[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """A call whose result has floating numbers, made in this dtype from arguments that have none."""
    names = [a.name for a in target._schema.arguments]
    if "dtype" in names:
        if names.index("dtype") < len(args):
            args[names.index("dtype")] = dtype
        else:
            kwargs["dtype"] = dtype
        return target(*args, **kwargs)
    if target.overloadpacket is aten.where:
        condition, *sides = args
        wide = (torch.as_tensor(x, dtype=dtype, device=condition.device) for x in sides)
        return torch.where(condition, *wide)
    real = pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) else x, args)
    return target(*real, **kwargs)


def in_float64(target: Any) -> Callable[..., Any]:
    """An operation that gives float64 where it would give the default dtype for integers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = target(*args, **kwargs)
        is_default = isinstance(found, Tensor) and found.dtype == torch.get_default_dtype() != torch.float64
        if not (is_default and isinstance(target, torch._ops.OpOverload) and is_of_integers((args, kwargs))):
            return found
        return from_integers(target, list(args), dict(kwargs), torch.float64)

    return run
