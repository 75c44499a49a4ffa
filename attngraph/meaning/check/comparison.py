"""Two tensors that should be equal: what differs, by how much, and where. The only such comparison here.

Shapes, dtypes, NaN and infinities must be the same. How far numbers may be off is a `Rule`.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDINGS = 64
"""By how many units in the last place of the largest value two answers may differ, where there is no exact
answer to compare them with."""

_PART = 1 << 17


@dataclasses.dataclass(frozen=True)
class Rule:
    """How large an error may be: `tolerance` times a scale, plus `eager` times an eager reference's error.

    The scale is the largest absolute value of the wanted tensor, at least `floor`. With `each`, every
    element has a scale of its own, `floor` plus its absolute value, and the error is relative to it.
    """

    tolerance: float = 0.0
    floor: float = 0.0
    each: bool = False
    eager: float = 0.0


EXACT = Rule()
FLASH = Rule(tolerance=1e-6, eager=2.0)
"""The flash-attention rule. The tolerance is for rounding where eager happens to be exact."""


def elementwise(tolerance: float, added: float = 0.0) -> Rule:
    """An error of at most `tolerance` times 1 + |value| + `added` in every element."""
    return Rule(tolerance, 1 + added, each=True)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a tensor differs from the wanted one.

    Attributes:
        error, scale: the largest error, and the scale for it (1 where errors are relative).
        eager_error: the largest error of the eager reference; 0 without one.
        problem: why the two cannot be equal whatever the rule ("another shape", "NaN in other places", ...).
        detail: the numbers of the problem, or of the largest error, and where it is.
    """

    rule: Rule
    error: float = 0.0
    scale: float = 0.0
    eager_error: float = 0.0
    problem: str = ""
    detail: str = ""

    @property
    def holds(self) -> bool:
        allowed = self.rule.tolerance * self.scale + self.rule.eager * self.eager_error
        return not self.problem and self.error <= allowed

    @property
    def relative(self) -> float:
        """The error in units of the scale."""
        return self.error / self.scale if self.scale else math.inf if self.error else 0.0

    def __str__(self) -> str:
        return f"{self.problem}: {self.detail}" if self.problem else self.detail


def compare(found: Tensor, wanted: Tensor, rule: Rule = EXACT, eager: Tensor | None = None) -> Comparison:
    """Compare `found` with `wanted`.

    Args:
        eager: where `wanted` is an exact answer in a wider dtype, the eager answer in the dtype of `found`.
            It decides where NaN and infinities are expected, and serves where the exact answer is not finite.
    """
    model = wanted if eager is None else eager
    if found.dtype != model.dtype:
        return Comparison(rule, problem="another dtype", detail=f"{found.dtype} instead of {model.dtype}")
    if found.shape != model.shape:
        detail = f"{list(found.shape)} instead of {list(model.shape)}"
        return Comparison(rule, problem="another shape", detail=detail)
    found, wanted, model = (_real(t.detach()) for t in (found, wanted, model))
    if not found.is_floating_point():
        other = found != model
        if not bool(other.any()):
            return Comparison(rule)
        return Comparison(rule, problem="another value", detail=_instead(found, model, _first(other)))
    if (told := _of_finite(found, wanted, model, rule)) is not None:
        return told
    for what, marks in (("NaN", torch.isnan), ("infinities", _infinities)):
        have, want = marks(found), marks(model)
        if not torch.equal(have, want):
            place = _first(have != want)
            detail = f"{int(have.count_nonzero())} instead of {int(want.count_nonzero())}, first at {place}"
            return Comparison(rule, problem=f"{what} in other places", detail=detail)
    known = wanted.isfinite()
    a, b, c = found.double(), wanted.double(), model.double()
    finite, lost = known & model.isfinite(), ~known & model.isfinite()
    if bool(lost.any()):
        wrong = lost & ((a - c).abs() > ROUNDINGS * torch.finfo(model.dtype).eps * largest(c, lost))
        if bool(wrong.any()):
            problem = "it differs from eager where the float64 model gives NaN or infinity"
            return Comparison(rule, problem=problem, detail=_instead(found, model, _first(wrong)))
    error = (a - b).abs().masked_fill(~finite, 0.0)
    scale = 1.0 if rule.each else max(rule.floor, largest(b))
    if rule.each:
        error = error / (rule.floor + b.abs().masked_fill(~known, 0.0))
    worst = float(error.max()) if error.numel() else 0.0
    detail = _instead(found, wanted, _first(error == worst)) if worst else ""
    return Comparison(rule, worst, scale, largest(c - b, finite), detail=detail)


def _of_finite(found: Tensor, wanted: Tensor, model: Tensor, rule: Rule) -> Comparison | None:
    """The comparison where all elements are finite: part by part, so that no pass over them leaves the
    processor's cache. None: some are not."""
    parts = zip(*(torch.split(t.reshape(-1), _PART) for t in (found, wanted, model)), strict=True)
    worst, place, scale, eager = 0.0, -1, 0.0, 0.0
    for number, part in enumerate(parts):
        a, b, c = (t.double() for t in part)
        if not a.numel():
            continue
        if not bool((a.sum() + b.sum() + c.sum()).isfinite()):
            return None
        size = b.abs()
        error = (a - b).abs_()
        error = error / (size + rule.floor) if rule.each else error
        largest_error, at = error.max(0)
        if float(largest_error) > worst:
            worst, place = float(largest_error), number * _PART + int(at)
        scale, eager = max(scale, float(size.max())), max(eager, float((c - b).abs_().max()))
    detail = "" if place < 0 else _instead(found, wanted, _indices(place, found.shape))
    return Comparison(rule, worst, 1.0 if rule.each else max(rule.floor, scale), eager, detail=detail)


def _indices(place: int, shape: Sequence[int]) -> list[int]:
    return [int(n) for n in torch.unravel_index(torch.tensor(place), tuple(shape))]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _infinities(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isinf(), tensor.sign(), 0)


def _first(mask: Tensor) -> list[int]:
    place: list[int] = mask.nonzero()[0].tolist()
    return place


def _instead(found: Tensor, wanted: Tensor, place: Sequence[int]) -> str:
    have, want = (t[tuple(place)].item() for t in (found, wanted))
    digits = 6 if f"{have:.6g}" != f"{want:.6g}" else 17
    return f"{have:.{digits}g} instead of {want:.{digits}g} at {list(place)}"


def largest(tensor: Tensor, where: Tensor | None = None) -> float:
    """The largest absolute value where `where` is true, or of all finite elements."""
    where = tensor.isfinite() if where is None else where
    return float(tensor.abs().masked_fill(~where, 0.0).max()) if tensor.numel() else 0.0
