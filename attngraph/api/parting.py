"""The line of a candidate at which its values part from the reference's.

Both sides run with every operation recorded. A value of the candidate is known if the reference has one of
as many elements with the same sum and spread, in whatever layout and at whatever place: two spellings
of a formula share what is before and after them. From the results that are not known the way leads back
through values that are not, to operations all of whose operands are: there the difference enters.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.capture.lines import is_torchs, line_at, outside

_CLOSE, _UNITS = 1e-10, 8
"""How far elements may be apart, relative to their mean size, in float64; and in units of the last place of a
narrower dtype."""
_FILL = 1e8
"""What is larger fills masked places: beside it other elements would not count."""
_OURS = "attngraph.api."
Mark = tuple[int, float, float, float]


@dataclasses.dataclass
class _Operation:
    line: str
    before: list[int]
    marks: list[Mark]


class _Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations in the order in which they run. `made_by`: the number of that which made a tensor, by its
    id."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.made_by: dict[int, int] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [self.made_by[id(t)] for t in _tensors((args, kwargs)) if id(t) in self.made_by]
        result = func(*args, **(kwargs or {}))
        frame = outside(sys._getframe(1), lambda f: is_torchs(f) or _OURS in str(f.f_globals.get("__name__")))
        found = _tensors(result)
        self.made_by |= {id(t): len(self.operations) for t in found}
        self._alive.append(result)  # so that no other tensor gets its id
        self.operations.append(_Operation(line_at(frame), before, [_mark(t) for t in found]))
        return result


def parts_at(
    reference: Callable[[], Any], candidate: Callable[[], Any], unit: float = 0.0
) -> tuple[str, str]:  # fmt: skip
    """The line of each side, "FILE:LINE", at which its results part from the other's; "" if that is not seen.
    `unit`: the last place of the narrowest dtype to which they round, below float64."""
    recorded, results = [], []
    for side in (reference, candidate):
        with torch.no_grad(), _Recorded() as record:
            results.append(side())
        recorded.append(record)
    close = max(_CLOSE, _UNITS * unit)
    first, second = (
        _first_unknown(recorded[n], recorded[1 - n], results[n], close) for n in range(2)
    )  # fmt: skip
    return first, second


def _first_unknown(side: _Recorded, other: _Recorded, results: Any, close: float) -> str:
    known: dict[int, list[Mark]] = {}
    for mark in (mark for operation in other.operations for mark in operation.marks):
        known.setdefault(mark[0], []).append(mark)

    def is_known(number: int) -> bool:
        marks = side.operations[number].marks
        return all(any(_equal(mark, m, close) for m in known.get(mark[0], ())) for mark in marks)

    stack = [side.made_by[id(t)] for t in _tensors(results) if id(t) in side.made_by]
    seen: set[int] = set()
    enters: list[int] = []
    while stack:
        number = stack.pop()
        if number in seen or is_known(number):
            continue
        seen.add(number)
        before = [n for n in side.operations[number].before if not is_known(n)]
        stack += before
        if not before:
            enters.append(number)
    return side.operations[min(enters)].line if enters else ""


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _mark(tensor: Tensor) -> Mark:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double()
    flat = flat.nan_to_num(nan=3.0).flatten()
    flat = torch.where(flat.abs() < _FILL, flat, 5 * flat.sign())
    apart = flat - flat.mean()
    return flat.numel(), float(flat.sum()), float(apart.square().sum()), float(flat.square().sum())


def _equal(a: Mark, b: Mark, close: float) -> bool:
    """Whether elements that are so far apart could have both."""
    count, error = a[0], close * math.sqrt(max(a[3], b[3]) / max(a[0], 1))
    spread = 2 * math.sqrt(count * max(a[2], b[2])) * error + count * error**2
    return abs(a[1] - b[1]) <= count * error and abs(a[2] - b[2]) <= spread
