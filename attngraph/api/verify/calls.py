"""Calls: the arguments that both sides are given, and which ones are tried after those that are given.

Other values are of the same kind as those of an example: by its values an argument says what it is. Flags are
booleans, or whole numbers 0 and 1; a mask of numbers is 0 where a key is seen and very low where not;
positions count up by one. What else is in order stays so.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SIZES = (1, 2, 3, 5, 8, 17, 130)
"""Extents that are tried beside those of the call."""
SMALL = {"numbers as small as 1e-3": 1e-3, "numbers as small as 1e-6": 1e-6}
"""Manners in which weights and floating arguments are smaller: an epsilon that is added to them counts."""
AS_GIVEN = "in the dtypes that are given"
"""The manner of the call itself, for sides that compute otherwise in float64."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
LOW = -1e4
"""From here on a number that is added to a score hides a key."""
HIDING = ("hidden at the end", "hidden at the beginning", "a row hidden")
COUNTING = ("positions moved", "positions begin anew")


def tries(call: Call, named: set[int], chosen: random.Random) -> Iterator[tuple[dict[int, int], str]]:
    """Extents to be replaced, and by what, and in which manner masks and positions are drawn: first the call
    as it is given, then in each manner, then with one extent at a time, the most telling first."""
    tensors = tensors_in(call)
    manners = list(dict.fromkeys(m for t in tensors for m in manners_of(t)))
    small, smallest = SMALL
    yield from (({}, manner) for manner in ("", small, *manners, AS_GIVEN, smallest))
    extents = dict.fromkeys(n for t in tensors for n in t.shape[: -1 if t.is_floating_point() else None])
    near = sorted(n + more for n in named for more in (0, 1) if 1 < n + more <= 600)
    for other in dict.fromkeys((*SIZES, *near)):
        yield from (({n: other}, chosen.choice(["", *manners])) for n in extents if n != other)


def varied(call: Call, sizes: Mapping[int, int], manner: str, chosen: random.Random) -> Call:
    """A call of other sizes and, where these are other ones or the manner asks for it, other values."""

    def other(tensor: Tensor) -> Tensor:
        if not sizes and manner not in manners_of(tensor):
            return tensor * SMALL.get(manner, 1.0) if is_plain(tensor) else tensor
        kept = tensor.ndim - is_plain(tensor)
        shape = [sizes.get(n, n) if d < kept else n for d, n in enumerate(tensor.shape)]
        torch.manual_seed(chosen.randrange(1 << 30))
        return like(tensor, shape, manner)

    return mapped(call, other)


def tensors_in(call: Any) -> list[Tensor]:
    """The tensors of a call."""
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]


def described(call: Call) -> tuple[str, ...]:
    """The dtypes and shapes of a call's tensors."""
    return tuple(f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors_in(call))


def mapped(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """A call with each of its tensors changed."""
    found: Call = pytree.tree_map_only(Tensor, change, call)
    return found


def replaced(call: Call, old: Tensor, new: Tensor) -> Call:
    """A call with a tensor in place of another."""
    return mapped(call, lambda tensor: new if tensor is old else tensor)


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


def is_plain(tensor: Tensor) -> bool:
    """Whether it is of numbers that mean only themselves."""
    return tensor.is_floating_point() and not is_mask_of_numbers(tensor)


def manners_of(tensor: Tensor) -> tuple[str, ...]:
    """In which manners other values than those that are given are of use."""
    if is_positions(tensor):
        return COUNTING
    return HIDING if tensor.ndim > 0 and (is_flags(tensor) or is_mask_of_numbers(tensor)) else ()


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
    if manner not in HIDING or last == 1:  # nothing is left of one token that is hidden, to tell it by
        return found
    rows, place = [shape[0] if len(shape) > 1 else 1, *[1] * (len(shape) - 1)], torch.arange(last)
    many = torch.randint(1, max(2, last), rows)
    hidden = place >= last - many if manner == HIDING[0] else place < many
    if manner == HIDING[2] and rows[0] > 1:
        hidden = hidden | (torch.arange(rows[0]).view(rows) == rows[0] - 1)
    return torch.where(hidden.expand(shape), not usual, found)
