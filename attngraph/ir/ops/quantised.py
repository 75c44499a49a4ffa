"""Values of 8 bits with scales: what a cache may keep in place of floating values.

    attngraph::quantised(Tensor[] values, str dtype) -> Tensor[]

Each vector along the last dimension (what one head has of one token) is divided by a float32 scale of its
own, such that its largest magnitude becomes the largest number of the dtype ("int8", "float8_e4m3fn"), and
rounded to nearest. The values have one shape; the results are all rounded values, then all scales, without
the last dimension. `widened` is the way back. A vector with an infinity or a NaN has a NaN as its scale, so
what is read of it is NaN and nothing is lost silently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngraph.ir.dtypes import DTYPES, SCALED
from attngraph.ir.ops.transforms import refuse_derivatives

torch.library.define("attngraph::quantised", "(Tensor[] values, str dtype) -> Tensor[]")
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


@torch.library.impl("attngraph::quantised", "CompositeExplicitAutograd")
def _quantised(values: Sequence[Tensor], dtype: str) -> list[Tensor]:
    with torch.no_grad():
        together = torch.stack(list(values))
        found, scales = quantise(together, NAMES[dtype])
        return [*found.unbind(), *scales.unbind()]


@torch.library.register_fake("attngraph::quantised")  # type: ignore[untyped-decorator]
def _quantised_fake(values: Sequence[Tensor], dtype: str) -> list[Tensor]:
    found = [value.new_empty(value.shape, dtype=NAMES[dtype]) for value in values]
    return found + [value.new_empty(value.shape[:-1], dtype=torch.float32) for value in values]


quantised = torch.ops.attngraph.quantised.default
refuse_derivatives("quantised", "a decoder has no gradients: differentiate the model itself")
