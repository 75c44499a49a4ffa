"""How a result lies in memory: as the model's own, on which the caller may rely."""

from __future__ import annotations

from torch import Tensor


def laid_out(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The tensor with its dimensions in this order in memory, from slowest to fastest; unchanged if they are
    already, or if no order is given."""
    if not order:
        return tensor
    dense = tensor.permute(order)
    if dense.is_contiguous():
        return tensor
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return dense.contiguous().permute(inverse)
