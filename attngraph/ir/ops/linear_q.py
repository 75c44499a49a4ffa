"""The attngraph dialect: a product with a weight of integers, and integers of 4 bits in bytes.

    attngraph::linear_q(x, w, scales?, zeros?, bias?) -> out
    attngraph::unpack(w, outs, packed) -> whole

    out[.., o] = sum over d of x[.., d] * (w[o, d] - zeros[o, d // group]) * scales[o, d // group] + bias[o]

`w` is `[out, in]` of int8 or uint8; `scales` and `zeros` are `[out, groups]`, `group` is in // groups: one
group is a scale for each output. Without zeros nothing is subtracted, without scales nothing is multiplied.
Activations are not rounded. It consists of differentiable ops, so it needs no backward of its own; integers
have no gradient. A decoder on the CPU computes it in C that reads the integers (`passes/fuse_token_wise`).

`whole` is the matrix `[outs, in]` of int8 whose elements lie in the bytes of `w` as the words in `packed` say
(`ir/language/packed.py`). C reads the bytes in its place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attngraph.ir.language.packed import Packed

torch.library.define("attngraph::unpack", "(Tensor w, int outs, str packed) -> Tensor")
torch.library.define(
    "attngraph::linear_q", "(Tensor x, Tensor w, Tensor? scales, Tensor? zeros, Tensor? bias) -> Tensor"
)


@torch.library.impl("attngraph::linear_q", "CompositeImplicitAutograd")
def _linear_q(
    x: Tensor, w: Tensor, scales: Tensor | None, zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    return F.linear(x, dequantised(w, scales, zeros, x.dtype), bias)


def dequantised(w: Tensor, scales: Tensor | None, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight `[out, in]` in a floating dtype."""
    whole = w.to(dtype)
    if scales is None and zeros is None:
        return whole
    groups = (zeros if scales is None else scales).shape[1]  # type: ignore[union-attr]
    parts = whole.reshape(whole.shape[0], groups, -1)
    if zeros is not None:
        parts = parts - zeros.unsqueeze(-1).to(dtype)
    if scales is not None:
        parts = parts * scales.unsqueeze(-1)
    return parts.reshape(whole.shape)


@torch.library.impl("attngraph::unpack", "CompositeImplicitAutograd")
def _unpack(w: Tensor, outs: int, packed: str) -> Tensor:
    return Packed.of(packed).unpacked(w, outs)


linear_q = torch.ops.attngraph.linear_q.default
unpack = torch.ops.attngraph.unpack.default
