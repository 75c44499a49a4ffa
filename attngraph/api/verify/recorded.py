"""The operations of one call, in the order in which they run, with marks of their results and their lines;
and the narrowest dtype to which they round.

A mark of a tensor tells equal values from others without keeping them: their number, sum and spread, whatever
their layout, and a sum that depends on their order.
"""

import collections
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from attngraph.api.verify.calls import tensors_in
from attngraph.capture.lines import is_torchs, line_at

_FILL = 1e8
"""What is larger fills masked places: beside it other elements would not count."""
_OURS = "attngraph.api."


class Mark(NamedTuple):
    """Of a tensor: how many elements it has, their sum, spread and sum of squares, and their sum weighted by
    their places in order."""

    size: int
    sum: float
    spread: float
    squares: float
    ordered: float


class Function(NamedTuple):
    """A function that runs, and the line at which it is: a frame of a stack."""

    function: Any
    line: str


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation. `key`: its name and the shapes of its results. `stack`: the user's functions that run,
    the innermost last. `before`: the numbers of what made its operands. An argument of the call or a tensor
    of a module that is read is an operation too, with an empty stack, and is `leaf`."""

    key: str
    stack: tuple[Function, ...]
    before: tuple[int, ...]
    marks: tuple[Mark, ...]
    leaf: Tensor | None = None


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations within."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._made_by: Any = WeakIdKeyDictionary()
        self._written: dict[int, int] = {}
        """Which operation wrote to a storage last."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs))
        before = tuple(dict.fromkeys(n for t in given for n in self.made(t)))
        result = func(*args, **(kwargs or {}))
        found = tensors_in(result)
        shapes = " ".join(str(list(t.shape)) for t in found)
        operation = Operation(f"{func} {shapes}", stack_of(sys._getframe(1)), before, tuple(map(mark, found)))
        for tensor in found:
            self._made_by[tensor] = len(self.operations)
        if getattr(func, "_schema", None) and func._schema.is_mutable:  # those of higher order have none
            self._written |= {t.untyped_storage()._cdata: len(self.operations) for t in found}
        self.operations.append(operation)
        return result

    def made(self, tensor: Tensor) -> tuple[int, ...]:
        """The numbers of the operations that made a tensor: the one that returned it, and a later one that
        wrote to it by another view."""
        if tensor not in self._made_by:
            self._made_by[tensor] = len(self.operations)
            self.operations.append(Operation(f"leaf {list(tensor.shape)}", (), (), (mark(tensor),), tensor))
        own = self._made_by[tensor]
        written = self._written.get(tensor.untyped_storage()._cdata, -1)
        return (own, written) if written > own else (own,)


class Record(NamedTuple):
    """Of a call: its operations, the numbers of those that made its results, and how often each of the user's
    functions was called, by its name."""

    operations: list[Operation]
    results: list[int]
    calls: collections.Counter[str]


def record(side: Callable[[], Any]) -> Record:
    """Record a call."""
    calls, before = collections.Counter[str](), sys.getprofile()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    try:
        with torch.no_grad(), Recorded() as recorded:
            sys.setprofile(count)
            results = side()
            sys.setprofile(before)
            made = [n for t in tensors_in(results) for n in recorded.made(t)]
    finally:
        sys.setprofile(before)
    return Record(recorded.operations, made, calls)


class Narrowest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meets what a call computes. `unit`: the last place of the narrowest dtype to which it rounds, first at
    `line`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit, self.line = 0.0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        units = units_of(tensors_in((args, kwargs, result)))
        # it rounds to, or computes with what was rounded to, a narrower one
        if units and min(units) < max(units) > self.unit:
            stack = stack_of(sys._getframe(1))
            self.unit, self.line = max(units), stack[-1].line if stack else ""
        return result


def units_of(tensors: Iterable[Tensor]) -> list[float]:
    """The last places of the floating ones, for numbers near 1."""
    return [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()]


def stack_of(frame: Any) -> tuple[Function, ...]:
    """The user's functions that run around an operation, the innermost last."""
    found: list[Function] = []
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "record" and name == __name__:
            break
        if not is_torchs(frame) and not name.startswith(_OURS):
            found.append(Function(frame.f_code, line_at(frame)))
        frame = frame.f_back
    return tuple(reversed(found))


def mark(tensor: Tensor) -> Mark:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double()
    flat = flat.nan_to_num(nan=3.0).flatten()
    flat = torch.where(flat.abs() < _FILL, flat, 5 * flat.sign())
    count = flat.numel()
    apart, squares = flat - flat.mean() if count else flat, flat.square().sum()
    ordered = flat @ _places(count)
    return Mark(count, *torch.stack([flat.sum(), apart.square().sum(), squares, ordered]).tolist())


@functools.lru_cache(maxsize=32)
def _places(count: int) -> Tensor:
    """A weight between -1 / 2 and 1 / 2 for each place."""
    return (torch.arange(count, dtype=torch.float64) * 0.6180339887498949).frac() - 0.5


def marks_alike(a: Mark, b: Mark, close: float, in_order: bool = False) -> bool:
    """Whether elements that are so far apart, relative to their mean size, could have both marks."""
    if a.size != b.size:
        return False
    error = close * math.sqrt(max(a.squares, b.squares) / max(a.size, 1))
    spread = 2 * math.sqrt(a.size * max(a.spread, b.spread)) * error + a.size * error**2
    return (
        abs(a.sum - b.sum) <= a.size * error
        and abs(a.spread - b.spread) <= spread
        and (not in_order or abs(a.ordered - b.ordered) <= a.size * error)
    )
