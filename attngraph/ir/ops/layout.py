"""How a value lies in memory: as the model's own, on which others rely; and writes through strides.

`laid_out`: `order` has the dimensions from the slowest in memory to the fastest; empty: as it is. The value
is copied where it lies in another way. It has no element rule, so what follows from it goes on following.

`strided_scatter` gives x with `src` at the places of `x.as_strided(size, stride, storage_offset)`, all of
them different. The elements of x fill its memory. It computes what `aten::as_strided_scatter` does, whose
derivative for x has the gradient of what is overwritten and none of the rest (torch 2.14); this has its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.ir.ops.declare import Size, Sizes, declare


@declare(schema="(Tensor(a) x, int[] order) -> Tensor(a)", plain=True)
def laid_out(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """The tensor with its dimensions in this order in memory, from slowest to fastest; unchanged if they are
    already, or if no order is given."""
    if not order:
        return tensor
    dense = tensor.permute(*order)
    if dense.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return dense.contiguous().permute(inverse)


@declare(plain=True)
def strided_scatter(x: Tensor, src: Tensor, size: Sizes, stride: Sizes, storage_offset: Size) -> Tensor:
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
