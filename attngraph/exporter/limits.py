"""The sizes that an exported program is valid for, checked by the program itself.

A trace takes one branch where a model asks for a size. A compiled model traces again for other sizes; a file
must refuse them, one row or one token among them where the model asks for that and does something else. In
pt2 it is an assertion with a message. ONNX has none: there an index is out of range unless the conditions
hold, so that the runtime fails instead of computing something else."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from attngraph.capture.sides import UNASKED, Sides, assumed, in_words
from attngraph.ir.graph.conditions import test_of

_NOWHERE = 1 << 20
"""An index that nothing has."""


class Limits:
    """Conditions on sizes, and what a trace decided about them; `names` has the name of each size that they
    mention, for people."""

    def __init__(self, conditions: Sequence[Any], names: Mapping[str, str], sides: Sides = UNASKED) -> None:
        every = [*assumed(conditions), *sides.strictly()]
        self.conditions = [c for c in dict.fromkeys(every) if {str(s) for s in c.free_symbols} <= set(names)]
        self._names = names

    def words(self) -> list[str]:
        """The conditions as users may read them: `x.shape[1] <= 64`."""
        return [in_words(c, self._names) for c in self.conditions]

    def hold(self, sizes: Mapping[str, Any], device: torch.device) -> Tensor | None:
        """Whether all hold, as a tensor that a trace follows; None where there are none. A size that is a
        tensor is one of each row."""
        found: Tensor | None = None
        known = {
            n: s if isinstance(s, Tensor) else torch.scalar_tensor(s, dtype=torch.int64, device=device)
            for n, s in sizes.items()
        }
        for condition in self.conditions:
            one = _holds(condition, known).all()
            found = one if found is None else found & one
        return found

    def checked(self, tensor: Tensor, holds: Tensor | None, in_onnx: bool) -> Tensor:
        """The tensor, unless the conditions do not hold."""
        if holds is None:
            return tensor
        if not in_onnx:
            torch._assert_async(holds, f"this file is for sizes with {' and '.join(self.words())}")
            return tensor
        place = torch.where(holds, 0, _NOWHERE).reshape(1)
        nothing = torch.zeros(1, dtype=tensor.dtype, device=tensor.device).index_select(0, place)
        return tensor + nothing.reshape(()) if tensor.dtype != torch.bool else tensor | nothing.reshape(())


def _holds(condition: Any, sizes: Mapping[str, Tensor]) -> Tensor:
    if isinstance(condition, (sympy.And, sympy.Or)):
        join = torch.logical_and if isinstance(condition, sympy.And) else torch.logical_or
        return functools.reduce(join, (_holds(part, sizes) for part in condition.args))
    names, test = test_of(condition)
    device = next(iter(sizes.values())).device
    return torch.as_tensor(test(*(sizes[name] for name in names)), device=device)
