"""Where a difference enters: the module, and the line of each side.

Both are found by running both sides once more, with what modules are given and return, and then every
operation, compared.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.api.parting import parts_at
from attngraph.api.settings import computed_at, kept_at
from attngraph.runtime.verify import tensors_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


def enters_in(sides: Sequence[Any], call: Call, unit: float) -> str:
    """The first module of the same name whose result differs although what it was given is equal. `unit`: the
    last place of the narrowest dtype to which sides round."""
    seen = [_recorded(side, call) for side in sides]
    close = max(1e-9, 8 * unit)
    for name, (taken, result) in seen[0].items():
        other = seen[1].get(name)
        if other and alike(taken, other[0], close) and not alike(result, other[1], close):
            return name
    return ""


def enters_at(sides: Sequence[Any], call: Call, unit: float) -> tuple[str, str]:
    """The line of each side at which values part: of an operation, of what computed its number, or of what
    made a tensor that a module keeps."""
    args, kwargs = call
    reference, candidate = (functools.partial(side, *args, **kwargs) for side in sides)
    states = [[*state_of(side), *tensors_in(call)] for side in sides]
    first, second = parts_at(reference, candidate, unit, states)
    made = "", ""
    if first.leaf is not None or second.leaf is not None:
        made = kept_at(sides, (first.leaf, second.leaf))
    elif first.name == second.name != "":
        made = computed_at(reference, candidate)
    return made if all(made) else (first.line, second.line)


def state_of(side: Any) -> list[Tensor]:
    """The weights and buffers of a module."""
    return [*side.parameters(), *side.buffers()] if isinstance(side, nn.Module) else []


def tensors_in(call: Any) -> list[Tensor]:
    """The tensors of a call."""
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]


def _recorded(model: Any, call: Call) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """What each module was given and returned in a call, in the order in which they returned."""
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    if not isinstance(model, nn.Module):
        return found

    def keep(name: str) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: Any, result: Any) -> None:
            found.setdefault(name, (tensors_in((args, kwargs)), tensors_of(result)))

        return hook

    hooks = [m.register_forward_hook(keep(n), with_kwargs=True) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():
            model(*call[0], **call[1])
    finally:
        for hook in hooks:
            hook.remove()
    return found


def alike(mine: Sequence[Tensor], theirs: Sequence[Tensor], close: float = 1e-9) -> bool:
    """Whether tensors are equal but for so much of the largest element."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(mine, theirs, strict=False)]
    return len(mine) == len(theirs) and all(
        a.shape == b.shape
        and a.is_floating_point() == b.is_floating_point()
        and (not a.is_floating_point() or apart(a, b) <= close * float(a.abs().max()))
        for a, b in pairs
        if a.numel()
    )


def apart(a: Tensor, b: Tensor) -> float:
    """How far numbers are apart where both are finite."""
    both = a.isfinite() & b.isfinite()
    return float((a - b)[both].abs().max()) if both.any() else 0.0
