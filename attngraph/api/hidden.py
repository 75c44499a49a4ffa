"""Which tokens of a call a mask hides: two sides may differ there, and nothing of use does."""

import functools
import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attngraph.api import drawn
from attngraph.api.calls import Call, replaced, tensors_in
from attngraph.api.entering import alike

_SMALLER = 0.1
Run = Callable[[Call, Tensor], list[Tensor]]
"""The results of the reference for a call, 0 for tokens that are not real."""


def hidden_tokens(run: Run, call: Call, example: Call, unit: float, chosen: random.Random) -> Tensor | None:
    """Tokens that a mask of the call hides, bool `[batch, tokens]`; None if there are none. `unit`: the last
    place of the narrowest dtype to which the reference rounds."""
    hides = functools.partial(_hides, run, max(1e-9, 8 * unit), chosen)
    for hidden, mask, none in drawn.hidden_by(tensors_in(call), tensors_in(example)):
        if hides(call, hidden, mask, none) or _hides_turned(hides, call, hidden, mask, none):
            return hidden
    return None


def _hides(
    run: Run, close: float, chosen: random.Random, call: Call, hidden: Tensor, mask: Tensor, none: Tensor,
    seen: bool = True,
) -> bool:  # fmt: skip
    """Whether a mask hides these tokens: the reference's results for the others do not change with them,
    but do with a mask that hides nothing (`none`), and one that hides all is not the same as that. Of two
    documents that do not see each other, none is hidden. `seen`: whether others see them without it."""
    changed, call = False, pytree.tree_map_only(Tensor, _tamed, call)

    def other(tensor: Tensor) -> Tensor:
        nonlocal changed
        if drawn.manners_of(tensor) or tensor.ndim < 2 or tensor.shape[:2] != hidden.shape:
            return tensor
        torch.manual_seed(chosen.randrange(1 << 30))
        changed = True
        place = hidden.view(*hidden.shape, *[1] * (tensor.ndim - 2))
        return torch.where(place, drawn.like(tensor, list(tensor.shape), ""), tensor)

    again = pytree.tree_map_only(Tensor, other, call)
    closed = mask.flatten()[(mask != none).flatten()][0]
    masked = [replaced(call, mask, m) for m in (none, torch.full_like(mask, closed.item()))]
    try:
        one, two, opened, shut = (run(c, ~hidden) for c in (call, again, *masked))
    except Exception:  # the reference takes no such mask: nothing is known of it
        return False
    same = functools.partial(alike, close=close)
    return changed and same(one, two) and not same(opened, shut) and not (seen and same(one, opened))


def _tamed(tensor: Tensor) -> Tensor:
    """Smaller numbers: where one score outweighs all others, what a mask hides changes nothing."""
    is_plain = tensor.is_floating_point() and not drawn.manners_of(tensor)
    return tensor * _SMALLER if is_plain else tensor


def _hides_turned(
    hides: Callable[..., bool], call: Call, hidden: Tensor, mask: Tensor, none: Tensor
) -> bool:  # fmt: skip
    """Whether a mask hides these tokens that no other sees anyway, as they are at the end of a causal
    sequence: in the other order it hides them, and in this one the others do not change with them."""
    if mask.ndim != 2:
        return False
    turned = mask.flip(-1)
    return hides(replaced(call, mask, turned), hidden.flip(-1), turned, none) and hides(
        call, hidden, mask, none, seen=False
    )
