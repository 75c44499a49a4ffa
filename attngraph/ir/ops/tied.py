"""What a fused attention gives where its weights are handed out: a result that follows from them, too.

Fused, an attention's result does not follow from the weights that a call returns beside it, so a gradient
with respect to these would be none. Where gradients are recorded, who runs the call says what takes the
value's place (`tying`): `number` is that of the result, and `kept` is what its weights are computed from
(`passes/look_later.py`). Anywhere else it is a copy of the value.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from attngraph.ir.ops.declare import declare
from attngraph.ir.ops.transforms import has_tangent, is_recorded, run_kernel

Tie = Callable[[int, Tensor, Sequence[Tensor]], Tensor]
"""Gives what takes the place of the result of this number, of this value and with these tensors kept."""
_local = threading.local()


@contextlib.contextmanager
def tying(tie: Tie) -> Iterator[None]:
    """Let `tie` say what takes the place of a fused result, in this thread."""
    outer: Tie | None = getattr(_local, "tie", None)
    try:
        _local.tie = tie
        yield
    finally:
        _local.tie = outer


def _autograd(keys: Any, value: Tensor, kept: list[Tensor], number: int) -> Tensor:
    tie: Tie | None = getattr(_local, "tie", None)
    if not is_recorded((value, kept)):
        found: Tensor = run_kernel(tied, keys, value, kept, number)
        return found
    if tie is None or has_tangent((value, kept)):
        return value.clone()
    return tie(number, value, kept)


@declare(fake=lambda a: a.value.clone(), derivatives=_autograd)
def tied(value: Tensor, kept: list[Tensor], number: int) -> Tensor:
    return value.clone()
