"""How a value lies in memory: as the model's own, on which others rely.

    attngraph::laid_out(x, order) -> x

`order` has the dimensions from the slowest in memory to the fastest; empty: as it is. The value is copied
where it lies in another way. It has no element rule, so what follows from it goes on following from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

torch.library.define("attngraph::laid_out", "(Tensor(a) x, int[] order) -> Tensor(a)")


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


torch.library.impl("attngraph::laid_out", "CompositeImplicitAutograd")(laid_out)
