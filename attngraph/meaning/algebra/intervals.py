"""Bounds of expressions over blocks of the index space, many blocks at once.

Interval arithmetic: a value is bounded by two tensors with one entry for each block of a grid, which
broadcast against `[blocks of b, of h, of q, of k]`; a single box is a grid of one block. A tensor that the
program reads at plain indices is bounded by its least and largest element in each block, so what a mask
of padding or of documents keeps is known before anything is computed.

Sound for the values that backends compute, rounding included: bounds are widened by what may be rounded,
and a value that may be NaN, may wrap around or is unknown is unbounded: nothing is concluded from it.
"""

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attngraph.ir.language import INDICES, Expr, operation_of

Interval = tuple[float, float]
EVERYTHING: Interval = (-math.inf, math.inf)
_ROUNDING = 2.0**-20
"""Relative error allowed to one operation on floats: more than that of float32."""
_TINY = 1e-37
_EXACT = 2.0**24
"""Integers up to this are represented exactly in float32."""
_HUGE = 3.3e38
"""A larger number may be infinite in float32."""
_LIMITS = {torch.int64: 2.0**53, torch.int32: 2.0**31, torch.bool: 2.0**53}
"""Larger integers are taken as unknown: they may wrap around, or float64 does not represent them exactly."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Least and largest value in each block, float64. `kind`: "bool", "int" or "float" as PyTorch
    would have it. `limit`: a larger integer of this kind is taken as unknown."""

    low: Tensor
    high: Tensor
    kind: str = "float"
    limit: float = 2.0**53

    @property
    def unbounded(self) -> Tensor:
        return torch.isinf(self.low) | torch.isinf(self.high)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The indices [start, stop) in blocks of `step`."""

    start: int
    stop: int
    step: int

    @property
    def count(self) -> int:
        return -(-(self.stop - self.start) // self.step)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Blocks of the index space: a cut of each of b, h, q and k; the sizes; the tensors that are read
    (without them, every read is unknown)."""

    b: Cut
    h: Cut
    q: Cut
    k: Cut
    sizes: tuple[int, ...] = ()
    reads: Sequence[Tensor] = ()

    def cut(self, name: str) -> Cut:
        found: Cut = getattr(self, name)
        return found

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.b.count, self.h.count, self.q.count, self.k.count

    def index(self, name: str) -> Bounds:
        cut = self.cut(name)
        low = torch.arange(cut.start, cut.stop, cut.step, dtype=torch.float64)
        shape = [1, 1, 1, 1]
        shape[INDICES.index(name)] = cut.count
        high = (low + (cut.step - 1)).clamp(max=cut.stop - 1)
        return Bounds(low.view(shape), high.view(shape), "int")


@dataclasses.dataclass(frozen=True)
class Box:
    """Inclusive ranges of the four indices, and the sizes (unknown if not given): a grid of one block."""

    b: Interval
    h: Interval
    q: Interval
    k: Interval
    sizes: tuple[int, ...] = ()

    def index(self, name: str) -> Bounds:
        return of_interval(getattr(self, name), "int")


def interval(node: Expr, box: Box, names: Mapping[str, Interval]) -> Interval:
    """Bounds of an expression on a box; booleans are 0 or 1. `names` bounds `dot`, `s`, `p`."""
    found = bounds(node, box, {name: of_interval(value) for name, value in names.items()})
    return float(found.low), float(found.high)


def of_interval(value: Interval, kind: str = "float") -> Bounds:
    low, high = (torch.tensor(x, dtype=torch.float64) for x in value)
    return Bounds(low, high, kind)


def bounds(
    node: Expr, grid: Grid | Box, names: Mapping[str, Bounds], known: dict[Expr, Bounds] | None = None
) -> Bounds:
    """Bounds of an expression in each block of a grid. `known` caches the bounds of parts, for expressions
    that share parts and have the same `names`."""
    known = {} if known is None else known
    found = known.get(node)
    if found is None:
        found = known[node] = _bounds(node, grid, names, known)
    return found


def _bounds(node: Expr, grid: Grid | Box, names: Mapping[str, Bounds], known: dict[Expr, Bounds]) -> Bounds:
    match node.op:
        case "const":
            return _constant(node)
        case "var":
            return grid.index(node.value)
        case "size":
            number = int(node.value[1:])
            if number >= len(grid.sizes):
                return of_interval(EVERYTHING, "int")
            return of_interval((float(grid.sizes[number]),) * 2, "int")
        case "dot" | "s" | "p":
            return names.get(node.op, of_interval(EVERYTHING))
        case "read":
            return _read(node, grid)
    args = [bounds(a, grid, names, known) for a in node.args]
    rule = _RULES.get(node.op)
    found = rule(*args) if rule is not None else _by_table(node.op, args)
    if node.op in _LOGIC:
        return found
    # An unbounded value may also be NaN, so nothing is known of a result either.
    unknown = functools.reduce(torch.logical_or, (a.unbounded for a in args))
    if found.kind == "int":
        limit = min(a.limit for a in args)
        unknown = unknown | (found.low <= -limit) | (found.high >= limit)
        found = dataclasses.replace(found, limit=limit)
    unknown = unknown | found.low.isnan() | found.high.isnan()
    ends = (0.0, 1.0) if found.kind == "bool" else EVERYTHING
    low, high = (torch.where(unknown, *pair) for pair in zip(ends, (found.low, found.high), strict=True))
    return dataclasses.replace(found, low=low, high=high)


_LOGIC = frozenset({"and", "or", "not", "where"})


def _constant(node: Expr) -> Bounds:
    if node.value == "nan":
        return of_interval(EVERYTHING)
    if node.kind != "float":
        return of_interval((float(node.value), float(node.value)), node.kind)
    value = float(node.value)
    found = of_interval((value, value))
    return found if ctypes.c_float(value).value == value else _widened(found)


def _read(node: Expr, grid: Grid | Box) -> Bounds:
    """The least and largest element that each block reads, where all indices are plain."""
    unknown = of_interval(EVERYTHING)
    names = [a.value for a in node.args if a.op == "var"]
    plain = all(a.op == "var" or (a.op == "const" and a.value >= 0) for a in node.args)
    if not isinstance(grid, Grid) or node.value >= len(grid.reads):
        return unknown
    if not plain or len(set(names)) < len(names):
        return unknown
    view = grid.reads[node.value].detach()
    if view.dtype not in (*_LIMITS, torch.float32, torch.float64):
        return unknown  # arithmetic of narrow types rounds or wraps around differently
    axis = 0
    for arg in node.args:
        if arg.op == "const":
            view = view.select(axis, int(arg.value))
        else:
            axis += 1
    low = high = view
    shape = [1, 1, 1, 1]
    for axis, name in enumerate(names):
        cut = grid.cut(name)
        if view.stride(axis) == 0:  # expanded: all elements along it are the same
            low, high = (x.narrow(axis, 0, 1) for x in (low, high))
            continue
        shape[INDICES.index(name)] = cut.count
        low, high = (_blockwise(x, axis, cut, f) for x, f in ((low, torch.amin), (high, torch.amax)))
    order = sorted(range(len(names)), key=lambda i: INDICES.index(names[i]))
    low, high = (x.permute(order).reshape(shape).to(torch.float64) for x in (low, high))
    limit = _LIMITS.get(view.dtype, Bounds.limit)
    kind = "float" if view.is_floating_point() else "bool" if view.dtype == torch.bool else "int"
    unclear = low.isnan() | high.isnan()
    if kind != "float":
        unclear = (low <= -limit) | (high >= limit)
    return Bounds(torch.where(unclear, -math.inf, low), torch.where(unclear, math.inf, high), kind, limit)


def _blockwise(tensor: Tensor, axis: int, cut: Cut, reduce: Callable[..., Tensor]) -> Tensor:
    part = tensor.narrow(axis, cut.start, cut.stop - cut.start)
    missing = cut.count * cut.step - part.shape[axis]
    if missing:
        last = part.narrow(axis, part.shape[axis] - 1, 1)
        part = torch.cat([part, last.expand([missing if i == axis else -1 for i in range(part.ndim)])], axis)
    shape = (*part.shape[:axis], cut.count, cut.step, *part.shape[axis + 1 :])
    return reduce(part.reshape(shape), axis + 1)


def _widened(found: Bounds) -> Bounds:
    """The bounds, widened by the rounding of one operation."""
    below, above = (bound.abs() * _ROUNDING + _TINY for bound in (found.low, found.high))
    return Bounds(found.low - below, found.high + above)


def _real(a: Bounds) -> Bounds:
    """As a float; a large integer may be rounded on the way."""
    if a.kind == "float":
        return a
    large = (a.low < -_EXACT) | (a.high > _EXACT)
    wide = _widened(a)
    return Bounds(torch.where(large, wide.low, a.low), torch.where(large, wide.high, a.high))


def _meet(a: Bounds, b: Bounds) -> tuple[Bounds, Bounds, str]:
    """Two operands as numbers of one kind: floats if either is a float."""
    if "float" in (a.kind, b.kind):
        return _real(a), _real(b), "float"
    return a, b, "int"


def _rounded(kind: str, low: Tensor, high: Tensor) -> Bounds:
    return _widened(Bounds(low, high)) if kind == "float" else Bounds(low, high, kind)


def _corners(a: Bounds, b: Bounds, function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    found = [function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return functools.reduce(torch.minimum, found), functools.reduce(torch.maximum, found)


def _arithmetic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Bounds, Bounds], Bounds]:
    def rule(a: Bounds, b: Bounds) -> Bounds:
        a, b, kind = _meet(a, b)
        return _rounded(kind, *_corners(a, b, function))

    return rule


def _div(a: Bounds, b: Bounds) -> Bounds:
    a, b = _real(a), _real(b)
    through_zero = (b.low <= 0) & (b.high >= 0)
    found = _corners(a, b, torch.div)
    return _rounded("float", *(torch.where(through_zero, math.nan, bound) for bound in found))


def _divisor(b: Bounds) -> Tensor:
    """One positive number; NaN where it may be another."""
    return torch.where((b.low == b.high) & (b.low > 0), b.low, math.nan)


def _floordiv(a: Bounds, b: Bounds) -> Bounds:
    """Floor division by one positive number. A quotient of floats may be rounded up to a whole number."""
    a, b, kind = _meet(a, b)
    divisor = _divisor(b)
    slack = 1.0 if kind == "float" else 0.0
    return _rounded(kind, (a.low / divisor).floor() - slack, (a.high / divisor).floor() + slack)


def _mod(a: Bounds, b: Bounds) -> Bounds:
    a, b, kind = _meet(a, b)
    divisor = _divisor(b)
    zero = divisor * 0.0
    if kind == "float":
        return Bounds(zero, divisor * torch.ones_like(a.low))
    same = (a.low / divisor).floor() == (a.high / divisor).floor()
    low = torch.where(same, a.low % divisor, zero)
    return Bounds(low, torch.where(same, a.high % divisor, divisor - 1), "int")


def _number(a: Bounds) -> str:
    return "float" if a.kind == "float" else "int"


def _extremum(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Bounds, Bounds], Bounds]:
    def rule(a: Bounds, b: Bounds) -> Bounds:
        a, b, kind = _meet(a, b)
        return Bounds(function(a.low, b.low), function(a.high, b.high), kind)

    return rule


def _where(condition: Bounds, a: Bounds, b: Bounds) -> Bounds:
    low, high = bit(condition)
    kind = "bool" if a.kind == b.kind == "bool" else "int"
    if "float" in (a.kind, b.kind):
        a, b, kind = _real(a), _real(b), "float"
    first, second = low >= 1, high <= 0
    low = torch.where(first, a.low, torch.where(second, b.low, torch.minimum(a.low, b.low)))
    high = torch.where(first, a.high, torch.where(second, b.high, torch.maximum(a.high, b.high)))
    return Bounds(low, high, kind, min(a.limit, b.limit))


def _truth(low: Tensor, high: Tensor) -> Bounds:
    return Bounds(low.to(torch.float64), high.to(torch.float64), "bool")


def _compare(
    function: Callable[[Tensor, Tensor], Tensor], turned: bool = False
) -> Callable[[Bounds, Bounds], Bounds]:
    def rule(a: Bounds, b: Bounds) -> Bounds:
        a, b, _ = _meet(a, b)
        a, b = (b, a) if turned else (a, b)
        huge = _is_huge(a) | _is_huge(b)
        return _truth(function(a.high, b.low) & ~huge, function(a.low, b.high) | huge)

    return rule


def _equal(a: Bounds, b: Bounds) -> Bounds:
    a, b, _ = _meet(a, b)
    huge = _is_huge(a) | _is_huge(b)
    single = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _truth(single & ~huge, ((a.low <= b.high) & (b.low <= a.high)) | huge)


def _is_huge(a: Bounds) -> Tensor:
    return (a.low < -_HUGE) | (a.high > _HUGE)


def bit(a: Bounds) -> tuple[Tensor, Tensor]:
    """Bounds of a truth value; a number counts as true unless it is zero."""
    true, false = (a.low > 0) | (a.high < 0), (a.low == 0) & (a.high == 0)
    return true.to(torch.float64), (~false).to(torch.float64)


def _not(a: Bounds) -> Bounds:
    low, high = bit(a)
    return _truth(1 - high, 1 - low)


def _both(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Bounds, Bounds], Bounds]:
    def rule(a: Bounds, b: Bounds) -> Bounds:
        (a_low, a_high), (b_low, b_high) = bit(a), bit(b)
        return _truth(function(a_low, b_low), function(a_high, b_high))

    return rule


def _by_table(op: str, args: Sequence[Bounds]) -> Bounds:
    """The bounds by the operation's row in the table of scalar functions."""
    row = operation_of(op)
    if row is None or row.interval is None:
        return of_interval(EVERYTHING)
    is_real = row.takes == "reals"
    args = [_real(a) for a in args] if is_real else args
    if row.interval == "rising":
        low, high = row.torch(args[0].low), row.torch(args[0].high)
    elif isinstance(row.interval, tuple):
        unclear = args[0].low.isnan() | (is_real & _is_huge(args[0]))  # at infinity it may be NaN
        low, high = (torch.where(unclear, math.nan, limit) for limit in row.interval)
    else:
        low, high = row.interval(*args)
    kind = _number(args[0]) if row.gives == "alike" else row.gives
    return _widened(Bounds(low, high)) if is_real else Bounds(low, high, kind)


_RULES: dict[str, Callable[..., Bounds]] = {
    "add": _arithmetic(torch.add),
    "sub": _arithmetic(torch.sub),
    "neg": lambda a: Bounds(-a.high, -a.low, _number(a)),
    "mul": _arithmetic(torch.mul),
    "div": _div,
    "floordiv": _floordiv,
    "mod": _mod,
    "min": _extremum(torch.minimum),
    "max": _extremum(torch.maximum),
    "where": _where,
    "le": _compare(torch.le),
    "lt": _compare(torch.lt),
    "ge": _compare(torch.le, turned=True),
    "gt": _compare(torch.lt, turned=True),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "and": _both(torch.minimum),
    "or": _both(torch.maximum),
    "not": _not,
    "int": lambda a: Bounds(a.low.trunc(), a.high.trunc(), "int"),
    "float": _real,
}  # fmt: skip
