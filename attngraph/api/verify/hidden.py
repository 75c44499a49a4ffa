"""Which tokens of a call a mask hides: two sides may differ there, and nothing of use does."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attngraph.api.verify.calls import (
    Call,
    is_flags,
    is_mask_of_numbers,
    is_plain,
    like,
    manners_of,
    mapped,
    replaced,
    tensors_in,
)  # fmt: skip
from attngraph.api.verify.entering import alike

_SMALLER = 0.1
"""How much smaller numbers are: where a score outweighs all others, what a mask hides changes nothing."""
Run = Callable[[Call, Tensor], list[Tensor]]
"""The results of the reference for a call, 0 for tokens that are not real."""


def hidden_tokens(run: Run, call: Call, example: Call, unit: float, chosen: random.Random) -> Tensor | None:
    """Tokens that a mask of the call hides, bool `[batch, tokens]`; None if there are none. `unit`: the last
    place of the narrowest dtype to which the reference rounds."""
    hides = functools.partial(_hides, run, max(1e-9, 8 * unit), chosen)
    for hidden, mask, none in _hidden_by(tensors_in(call), tensors_in(example)):
        if hides(call, hidden, mask, none):
            return hidden
        # or tokens that no other sees anyway, as at the end of a causal sequence: turned, they are hidden
        turned = mask.flip(-1)
        other_way = mask.ndim == 2 and hides(replaced(call, mask, turned), hidden.flip(-1), turned, none)
        if other_way and hides(call, hidden, mask, none, seen=False):
            return hidden
    return None


def _hidden_by(call: Sequence[Tensor], example: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens that a mask of the call may hide, bool `[batch, tokens]`, with the mask and one that hides
    nothing. False and very low numbers hide; of flags that are never set in the example, those that are."""
    for tensor, own in zip(call, example, strict=True):
        if tensor.ndim > 1 and (is_flags(tensor) or is_mask_of_numbers(tensor)):
            of_numbers = tensor.is_floating_point()
            open_ = 0.0 if of_numbers else float(own.bool().any())
            rows = (tensor == open_).reshape(tensor.shape[0], -1, tensor.shape[-1])
            hidden = ~rows.any(1)
            if (hidden.any(1) & ~hidden.all(1)).any():
                yield hidden, tensor, torch.full_like(tensor, open_)


def _hides(
    run: Run, close: float, chosen: random.Random, call: Call, hidden: Tensor, mask: Tensor, none: Tensor,
    seen: bool = True,
) -> bool:  # fmt: skip
    """Whether a mask hides these tokens: the reference's results for the others do not change with them,
    but do with a mask that hides nothing (`none`), and one that hides all is not the same as that. Of two
    documents that do not see each other, none is hidden. `seen`: whether others see them without it."""
    changed, call = False, mapped(call, lambda t: t * _SMALLER if is_plain(t) else t)

    def other(tensor: Tensor) -> Tensor:
        nonlocal changed
        if manners_of(tensor) or tensor.ndim < 2 or tensor.shape[:2] != hidden.shape:
            return tensor
        torch.manual_seed(chosen.randrange(1 << 30))
        changed = True
        place = hidden.view(*hidden.shape, *[1] * (tensor.ndim - 2))
        return torch.where(place, like(tensor, list(tensor.shape), ""), tensor)

    again = mapped(call, other)
    closed = mask.flatten()[(mask != none).flatten()][0]
    masked = [replaced(call, mask, m) for m in (none, torch.full_like(mask, closed.item()))]
    try:
        one, two, opened, shut = (run(c, ~hidden) for c in (call, again, *masked))
    except Exception:  # the reference takes no such mask: nothing is known of it
        return False
    same = functools.partial(alike, close=close)
    return changed and same(one, two) and not same(opened, shut) and not (seen and same(one, opened))
