"""Where a difference enters: the module, and the line of each side.

Both are found by running both sides once more, with what modules are given and return, and then every
operation, compared.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from attngraph.api.calls import Call, tensors_in
from attngraph.api.modules_run import recorded
from attngraph.api.parting import parts_at
from attngraph.api.settings import computed_at, kept_at
from attngraph.api.steps import Steps


def enters_in(sides: Sequence[Any], call: Call, unit: float) -> tuple[str, str]:
    """The first module of the same name whose result differs although what it was given is equal, and ""; of
    steps, the first one, and its argument if it is given other values. `unit`: the last place of the
    narrowest dtype to which sides round."""
    mine, theirs = (recorded(side, call) for side in sides)
    close, steps = max(1e-9, 8 * unit), isinstance(sides[1], Steps)
    for name, (given, result) in ((n, c) for n, c in mine.items() if n in theirs):
        others = theirs[name]
        if steps:  # a token's values are compared where both sides have them for every token
            other = next((n for n in given if _unlike(given[n], others[0].get(n), close)), "")
            if other or any(_unlike(a, b, close) for a, b in zip(result, others[1], strict=False)):
                return name, other
        elif alike([*given.values()], [*others[0].values()], close) and not alike(result, others[1], close):
            return name, ""
    return "", ""


def enters_at(sides: Sequence[Any], call: Call, unit: float) -> tuple[str, str]:
    """The line of each side at which values part: of an operation, of what computed its number, or of what
    made a tensor that a module keeps; "" of sides that cannot be looked into."""
    if any(getattr(side, "untraced", "") for side in sides):
        return "", ""
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


def alike(mine: Sequence[Tensor], theirs: Sequence[Tensor], close: float = 1e-9) -> bool:
    """Whether tensors are equal but for so much of the largest element, where they round."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(mine, theirs, strict=False)]
    return len(mine) == len(theirs) and all(
        a.shape == b.shape
        and _rounds(a) == _rounds(b)
        and (distance(a, b) <= close * float(a.abs().max()) if _rounds(a) else bool((a == b).all()))
        for a, b in pairs
        if a.numel()
    )


def distance(a: Tensor, b: Tensor) -> float:
    """How far numbers are apart where both are finite."""
    both = a.isfinite() & b.isfinite()
    return float((a - b)[both].abs().max()) if both.any() else 0.0


def _rounds(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _unlike(a: Tensor, b: Tensor | None, close: float) -> bool:
    """Whether the second has other values for the same tokens, of each row or of all, or more tokens."""
    if b is None or a.ndim != b.ndim or a.ndim < 2 or a.shape[2:] != b.shape[2:]:
        return False
    if a.shape[1] != b.shape[1] or 1 not in (len(a), len(b), len(a) == len(b)):
        return b.shape[1] > a.shape[1] and len(a) == len(b)
    rows = max(len(a), len(b))
    return not alike([a.expand(rows, *a.shape[1:])], [b.expand(rows, *b.shape[1:])], close)
