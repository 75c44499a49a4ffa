"""Numbers of 8 bits and fewer: rounded values with scales, products with weights of integers, packed ones.

`quantised` divides each vector along the last dimension (what one head has of one token) by a float32 scale
of its own, such that its largest magnitude becomes the largest number of the dtype ("int8", "float8_e4m3fn"),
and rounds to nearest. The values have one shape; the results are all rounded values, then all scales, without
the last dimension. `widened` is the way back. A vector with an infinity or a NaN has a NaN as its scale, so
what is read of it is NaN and nothing is lost silently. `linear_q` gives

    out[.., o] = sum over d of x[.., d] * (w[o, d] - zeros[o, d // group]) * scales[o, d // group] + bias[o]

`w` is `[out, in]` of int8 or uint8; `scales` and `zeros` are `[out, groups]`, `group` is in // groups.
Without zeros nothing is subtracted, without scales nothing is multiplied; activations are not rounded. It
consists of differentiable ops; integers have no gradient. A decoder on the CPU computes it in C that reads
the integers.

`unpack` gives the matrix `[outs, in]` of int8 whose elements lie in the bytes of `w` as the words in
`packed` say (`ir/language/packed.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attngraph.ir.dtypes import DTYPES, SCALED
from attngraph.ir.language.packed import Packed
from attngraph.ir.ops.declare import INSTEAD, declare

LARGEST = {dtype: DTYPES[dtype].largest for dtype in SCALED}
"""The largest number of each dtype that is used."""
NAMES = {DTYPES[dtype].name: dtype for dtype in SCALED}
_TINY = torch.finfo(torch.float32).tiny
_SLACK = 1 + 2.0**-10
"""For the rounding of the scale and of the quotient, which are float32."""
_FINEST = 2.0**-10
"""Half of the distance between the smallest numbers of float8_e4m3fn."""
_RELATIVE = 2.0**-4
"""Half of the distance between its numbers of three binary digits, relative to them."""


def quantise(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Vectors along the last dimension as rounded values and scales, `[...]`."""
    wide = values if values.dtype == torch.float64 else values.float()
    largest = wide.abs().amax(-1)
    by = (largest / LARGEST[dtype] + (largest - largest)).clamp_min(_TINY).float()  # inf - inf is NaN
    shares = wide / by.unsqueeze(-1)
    return (shares.round() if dtype == torch.int8 else shares).to(dtype), by


def widened(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantise` gave as floating values."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (values.to(wide) * scales.to(wide).unsqueeze(-1)).to(dtype)


def largest_error(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A bound of |x - widened(quantise(x))| for each element x of `values`, in float64: half a scale for
    integers; for floating values a sixteenth of x, or half of their smallest distance, times the scale."""
    by = scales.double().unsqueeze(-1)
    if dtype == torch.int8:
        return (0.5 * _SLACK * by).expand_as(values)
    return _SLACK * torch.maximum(_RELATIVE * values.double().abs(), _FINEST * by)


def _shapes(a: Any) -> list[Tensor]:
    found = [value.new_empty(value.shape, dtype=NAMES[a.dtype]) for value in a.values]
    return found + [value.new_empty(value.shape[:-1], dtype=torch.float32) for value in a.values]


@declare(fake=_shapes, derivatives=INSTEAD)
def quantised(values: Sequence[Tensor], dtype: str) -> list[Tensor]:
    found, scales = quantise(torch.stack(list(values)), NAMES[dtype])
    return [*found.unbind(), *scales.unbind()]


@declare(fake=lambda a: torch.empty_like(a.value), derivatives=INSTEAD)
def as_kept(value: Tensor, dtype: str) -> Tensor:
    """A value as it will be read from a cache of this dtype."""
    if value.dtype == torch.float64:
        return value  # in proofs nothing is rounded
    if dtype in NAMES:
        return widened(*quantise(value, NAMES[dtype]), value.dtype)
    return value.to(getattr(torch, dtype)).to(value.dtype)


# --- weights of integers ---


@declare()
def linear_q(
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


@declare()
def unpack(w: Tensor, outs: int, packed: str) -> Tensor:
    return Packed.of(packed).unpacked(w, outs)
