"""A write through strides, as a new tensor.

    attngraph::strided_scatter(x, src, size, stride, storage_offset) -> out

`out` is x with `src` at the places of `x.as_strided(size, stride, storage_offset)`, all of them different.
The elements of x fill its memory. It computes what `aten::as_strided_scatter` does, whose derivative for x
has the gradient of what is overwritten and none of the rest (torch 2.14); these ops have theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

torch.library.define(
    "attngraph::strided_scatter",
    "(Tensor x, Tensor src, SymInt[] size, SymInt[] stride, SymInt storage_offset) -> Tensor",
)


def strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int
) -> Tensor:  # fmt: skip
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    memory = x.permute(order)
    places = torch.full([1] * len(size), storage_offset, dtype=torch.int64, device=x.device)
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(extent, device=x.device) * step
        places = places + along.view([-1 if d == axis else 1 for d in range(len(size))])
    written = memory.reshape(-1).index_put((places.reshape(-1),), src.reshape(-1))
    return written.reshape(memory.shape).permute(inverse)


torch.library.impl("attngraph::strided_scatter", "CompositeImplicitAutograd")(strided_scatter)
