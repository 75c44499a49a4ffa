"""Where tensors lie and what they are, to tell whether compiled calls that were made for them still fit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where tensors lie and what they are. Made by functions of C, because a step has hundreds of weights."""

    addresses: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]


def places(tensors: Sequence[Tensor]) -> Places:
    """The places of these tensors."""
    return Places(*addresses(tensors), tuple(map(Tensor.size, tensors)), tuple(map(_DTYPE, tensors)))


def addresses(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Where each tensor begins, and its strides."""
    return tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.stride, tensors))


_DTYPE = operator.attrgetter("dtype")


def ranks(places: Places) -> list[int]:
    """How many dimensions each has."""
    return list(map(len, places.shapes))
