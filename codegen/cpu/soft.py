"""When a finite fill hides a key completely.

Masking with -1e9 or with the smallest float does not make a weight zero by definition. Whether it is zero
depends on the scores, so it is decided at run time: if the largest unmasked score of every row is so far
above every masked score that the exponential of the difference underflows to exactly zero, the masked keys
are skipped. Otherwise they are computed.
"""

import math

import torch
from torch import Tensor

from attngraph.ir.language.score import ScoreProgram
from attngraph.ir.ops.kernels import Reads
from attngraph.meaning.masks.score_bounds import hidden_below

UNDERFLOW = {torch.float32: 104.0, torch.float64: 746.0}
"""exp(-x) is exactly zero from here on: log of half the smallest subnormal number, rounded up."""


def has_finite_fill(program: ScoreProgram) -> bool:
    return any(not keep.is_hard for keep in program.keeps)


def largest_dot(q: Tensor, k: Tensor) -> float:
    """A bound of |q . k| over all pairs, by Cauchy and Schwarz; infinite if anything is not finite."""
    bound = torch.linalg.vector_norm(q, dim=-1).amax() * torch.linalg.vector_norm(k, dim=-1).amax()
    value = float(bound)
    return value if value == value else float("inf")


def largest_score(program: ScoreProgram, scale: float, q: Tensor, k: Tensor, reads: Reads) -> float:
    """A bound of |scale * q . k|. Infinite where a mask that adds minus infinity must not be skipped: adding
    it leaves a NaN or infinite score NaN or infinite."""
    if any(keep.lowers for keep in program.keeps):
        numbers = (r for r in reads if r.is_floating_point())
        if not all(bool(r.isfinite().all()) for r in numbers):
            return math.inf
    return abs(scale) * largest_dot(q, k)


def hides(program: ScoreProgram, lse: Tensor, keys: int, dot: float, sizes: tuple[int, ...]) -> bool:
    """Whether keys behind a finite fill, if there is one, get a weight of exactly zero in every row.

    Args:
        lse: the rows' log-sum-exp over so many `keys`: a row's largest unmasked score is at least that
            without the logarithm of their number.
        dot: a bound of |dot|.
    """
    if not has_finite_fill(program):
        return True
    lowest = float(lse.amin()) - math.log(keys)
    return lowest - hidden_below(program, dot, sizes) > UNDERFLOW[lse.dtype]
