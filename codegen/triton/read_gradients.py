"""The plan of backward kernels; `codegen/scalar/read_gradients.py` says what they sum for read tensors."""

from __future__ import annotations

import dataclasses

from attngraph.codegen.scalar import read_gradients as common
from attngraph.codegen.scalar.read_gradients import COLUMNS, FLOATING, PAIRS, ROWS, ReadGradient, Totals
from attngraph.codegen.triton.plan import Plan

__all__ = ["COLUMNS", "FLOATING", "PAIRS", "ROWS", "BackwardPlan", "ReadGradient", "Totals", "read_gradients"]


@dataclasses.dataclass(frozen=True)
class BackwardPlan(Plan):
    """`wanted`: numbers of the reads whose gradients are asked for."""

    wanted: tuple[int, ...] = ()


def read_gradients(plan: BackwardPlan) -> tuple[ReadGradient, ...]:
    """What the kernels of a plan sum for the reads that are wanted.

    Raises:
        UnsupportedError: as the common function does.
    """
    return common.read_gradients(plan.program, plan.wanted)
