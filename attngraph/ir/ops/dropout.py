"""Dropout whose random numbers follow from a seed.

An element is kept where `random(seed, its indices) >= p`, and scaled by `1 / (1 - p)`. A fused attention
drops its weights by the same numbers, so given its seed this says which weights it dropped.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.ir.language import Environment, Tile, evaluate
from attngraph.ir.ops.declare import declare


def dropout(value: Tensor, seed: Any, rate: float, kept: Tensor | None = None) -> Tensor:
    """The values that a dropout keeps, scaled; the others are 0. `kept`: which they are, if that is known."""
    kept = kept_elements(seed, value.shape, rate, value.device) if kept is None else kept
    return torch.where(kept, value * (1 / (1 - rate)), 0.0)


@declare()
def _dropout(value: Tensor, seed: Tensor, p: float) -> Tensor:
    return dropout(value, seed, p)


def kept_elements(
    seed: Any, shape: Sequence[int], rate: float, device: torch.device,
    box: Sequence[Sequence[int] | None] | None = None,
) -> Tensor:  # fmt: skip
    """Which elements of a tensor of this shape a dropout keeps. `box`: the indices of each dimension that are
    asked for; None: all."""
    env = Environment(Tile((0, 0), (0, 0), (0, 0), (0, 0)), (), (), torch.float64, device)
    places: list[Any] = []
    for axis, (extent, wanted) in enumerate(zip(shape, box or [None] * len(shape), strict=True)):
        asked = torch.arange(extent) if wanted is None else torch.tensor(wanted, dtype=torch.int64)
        places.append(asked.to(device).view([-1 if d == axis else 1 for d in range(len(shape))]))
    return evaluate.random([seed, *evaluate.counters(places, list(shape))], env) >= rate
