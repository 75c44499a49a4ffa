"""Calls: the arguments that both sides are given, and which ones are tried after those that are given."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attngraph.api import drawn

SIZES = (1, 2, 3, 5, 8, 17, 130)
"""Extents that are tried beside those of the call."""
SMALL = {"numbers as small as 1e-3": 1e-3, "numbers as small as 1e-6": 1e-6}
"""Manners in which weights and floating arguments are smaller: an epsilon that is added to them counts."""
AS_GIVEN = "in the dtypes that are given"
"""The manner of the call itself, for sides that compute otherwise in float64."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


def tries(call: Call, named: set[int], chosen: random.Random) -> Iterator[tuple[dict[int, int], str]]:
    """Extents to be replaced, and by what, and in which manner masks and positions are drawn: first the call
    as it is given, then in each manner, then with one extent at a time, the most telling first."""
    tensors = tensors_in(call)
    manners = list(dict.fromkeys(m for t in tensors for m in drawn.manners_of(t)))
    small, smallest = SMALL
    yield from (({}, manner) for manner in ("", small, *manners, AS_GIVEN, smallest))
    extents = dict.fromkeys(n for t in tensors for n in t.shape[: -1 if t.is_floating_point() else None])
    near = sorted(n + more for n in named for more in (0, 1) if 1 < n + more <= 600)
    for other in dict.fromkeys((*SIZES, *near)):
        yield from (({n: other}, chosen.choice(["", *manners])) for n in extents if n != other)


def varied(call: Call, sizes: Mapping[int, int], manner: str, chosen: random.Random) -> Call:
    """A call of other sizes and, where these are other ones or the manner asks for it, other values."""

    def other(tensor: Tensor) -> Tensor:
        plain = tensor.is_floating_point() and not drawn.is_mask_of_numbers(tensor)
        kept = tensor.ndim - 1 if plain else tensor.ndim
        shape = [sizes.get(n, n) if d < kept else n for d, n in enumerate(tensor.shape)]
        if not sizes and manner not in drawn.manners_of(tensor):
            return tensor * SMALL.get(manner, 1.0) if plain else tensor
        torch.manual_seed(chosen.randrange(1 << 30))
        return drawn.like(tensor, shape, manner)

    found: Call = pytree.tree_map_only(Tensor, other, call)
    return found


def tensors_in(call: Any) -> list[Tensor]:
    """The tensors of a call."""
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]


def described(call: Call) -> tuple[str, ...]:
    """The dtypes and shapes of a call's tensors."""
    return tuple(f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in tensors_in(call))


def replaced(call: Call, old: Tensor, new: Tensor) -> Call:
    """A call with a tensor in place of another."""
    found: Call = pytree.tree_map_only(Tensor, lambda tensor: new if tensor is old else tensor, call)
    return found
