"""Plans that are kept: what follows from the shapes of a call is found once, not at each launch.

A plan takes hundreds of microseconds (formulas are walked, tiles are chosen), a launch some tens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from attngraph.codegen.scalar.form import SMALL
from attngraph.codegen.triton import tuned, visits
from attngraph.codegen.triton.device import name_of
from attngraph.ir.language.score import ScoreProgram

MOST = 4096
"""Plans that are kept, of one kernel."""
P = TypeVar("P")


class KeptPlans(Generic[P]):
    """The plans of one kernel, by all that they follow from."""

    def __init__(self) -> None:
        self._found: dict[Hashable, P] = {}

    def get(self, key: Hashable, make: Callable[[], P]) -> P:
        """The plan of this key, made where it is not known."""
        try:
            return self._found[key]
        except KeyError:
            if len(self._found) >= MOST:
                self._found.clear()
            found = self._found[key] = make()
            return found


def key_of(
    program: ScoreProgram, operands: Sequence[Tensor], reads: Sequence[Tensor], sizes: Sequence[int],
    gradients: bool = False,
) -> Hashable:  # fmt: skip
    """All that the plan of a call follows from: the program, how its tensors lie in memory, whether sizes are
    large, the device, and what was measured on it. `gradients`: also which tensors want gradients."""
    device = operands[0].device
    found: tuple[Hashable, ...] = (
        program, device, max(map(abs, sizes), default=0) >= SMALL,
        name_of(device), tuned.changes(), visits.WORTH,
        *[(t.dtype, t.shape, t.stride()) for t in (*operands, *reads)],
    )  # fmt: skip
    return (*found, *[t.requires_grad for t in (*operands, *reads)]) if gradients else found
