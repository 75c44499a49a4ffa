"""Values of the same kind as those of an example: a mask stays one, and so do positions.

By its values an argument says what it is. Flags are booleans, or whole numbers 0 and 1; a mask of numbers is
0 where a key is seen and very low where not; positions count up by one. What else is in order stays so.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LOW = -1e4
"""From here on a number that is added to a score hides a key."""
HIDING = ("hidden at the end", "hidden at the beginning", "a row hidden")
COUNTING = ("positions moved", "positions begin anew")


def is_flags(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (
        tensor.dtype == torch.bool
        or (not tensor.is_floating_point() and bool(((tensor == 0) | (tensor == 1)).all()))
    )


def is_positions(tensor: Tensor) -> bool:
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool and tensor.ndim > 0
    return whole and tensor.shape[-1] > 1 and bool((tensor.diff(dim=-1) == 1).all())


def is_mask_of_numbers(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    low = tensor <= LOW
    return bool(low.any()) and bool((low | (tensor == 0)).all())


def manners_of(tensor: Tensor) -> tuple[str, ...]:
    """In which manners other values than those that are given are of use."""
    if is_positions(tensor):
        return COUNTING
    return HIDING if tensor.ndim > 0 and (is_flags(tensor) or is_mask_of_numbers(tensor)) else ()


def hidden_by(call: Sequence[Tensor], example: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
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


def like(tensor: Tensor, shape: list[int], manner: str) -> Tensor:
    """Values of the kind of `tensor` in this shape, of as many dimensions, drawn by torch's generator."""
    if not tensor.ndim or not tensor.numel():
        return tensor
    if is_positions(tensor):
        return _positions(tensor, shape, manner)
    if is_flags(tensor):
        return _flags(tensor.bool(), shape, manner).to(tensor.dtype)
    if is_mask_of_numbers(tensor):
        seen = _flags(tensor == 0, shape, manner)
        return torch.zeros(shape, dtype=tensor.dtype).masked_fill(~seen, float(tensor.min()))
    if tensor.is_floating_point():
        spread = tensor[tensor.isfinite()]
        by = float(spread.std()) if spread.numel() > 1 else 0.0
        return torch.randn(shape, dtype=tensor.dtype) * (by or 1.0)
    found = torch.randint(int(tensor.min()), int(tensor.max()) + 1, shape, dtype=tensor.dtype)
    ordered = tensor.ndim > 0 and tensor.shape[-1] > 2 and bool((tensor.diff(dim=-1) >= 0).all())
    return found.sort(-1).values if ordered else found


def _positions(tensor: Tensor, shape: list[int], manner: str) -> Tensor:
    """Numbers that count up along the last dimension from where the example does; each row from a later one;
    or twice in a row, as in packed documents."""
    first, count = int(tensor.flatten()[0]), torch.arange(shape[-1], dtype=tensor.dtype)
    if manner == COUNTING[0]:
        count = count + torch.randint(1, 4, [*shape[:-1], 1], dtype=tensor.dtype)
    elif manner == COUNTING[1]:
        count = count % max(1, shape[-1] - shape[-1] // 3)
    return (count + first).expand(shape).clone()


def _flags(flags: Tensor, shape: list[int], manner: str) -> Tensor:
    """The flags that are given, where they have this shape, else others that are as often set; a part of each
    row, at one end, has the rarer value, or the last row as a whole."""
    usual, last = bool(flags.float().mean() >= 0.5), shape[-1]
    if list(flags.shape) == shape:
        found = flags.clone()
    elif flags.ndim > 1 and torch.equal(flags, flags.tril()) and bool(flags.diagonal(0, -2, -1).all()):
        found = torch.ones(shape, dtype=torch.bool).tril()
    else:
        found = torch.rand(shape) < flags.float().mean()
    if (
        manner not in HIDING or last == 1
    ):  # of one token that is hidden nothing is left to tell what that means
        return found
    rows, place = [shape[0] if len(shape) > 1 else 1, *[1] * (len(shape) - 1)], torch.arange(last)
    many = torch.randint(1, max(2, last), rows)
    hidden = place >= last - many if manner == HIDING[0] else place < many
    if manner == HIDING[2] and rows[0] > 1:
        hidden = hidden | (torch.arange(rows[0]).view(rows) == rows[0] - 1)
    return torch.where(hidden.expand(shape), not usual, found)
