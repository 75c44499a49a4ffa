"""From index expressions back to views: how to see a tensor as `[role, role, ...]` without copying.

The recogniser knows an operand as "element (e0, e1, ...) of this tensor", each e an expression over
index variables. `solve` finds the chain of unflatten, slice, select, permute, expand and reshape
steps that presents those elements in the wanted order, or says that there is none.
"""

from __future__ import annotations

import dataclasses
import itertools

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M

Roles = tuple[tuple[Expr, ...], ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One view operation; `sizes` are size expressions, `dims` plain numbers."""

    op: str
    dims: tuple[int, ...] = ()
    sizes: tuple[Expr, ...] = ()


class NoView(Exception):
    """These elements are not a view of the tensor."""


def solve(shape: tuple[Expr, ...], index: tuple[Expr, ...], roles: Roles, full: Roles) -> list[Step]:
    """Steps that turn a tensor of `shape` into one dimension per role, such that the element at the
    roles' indices is the tensor's element at `index`.

    Args:
        roles: for each wanted dimension the variables it runs over, slowest first, as far as this
            tensor may be broadcast over the others.
        full: the same with every variable that the dimension must run over.

    The index must be in range for all values of its variables (as it is for elements that a graph
    reads): that is not shown again here.

    Raises:
        NoView: some index is no mixture of digits (a flip, a gather, overlapping windows).
    """
    steps: list[Step] = []
    present: list[Expr] = []
    for extent, place in zip(shape, index, strict=True):
        _split_dimension(extent, place, present, steps)
    if len(set(present)) != len(present):
        raise NoView
    wanted = [v for role in full for v in role]
    if any(v not in wanted for v in present):
        raise NoView
    order = [present.index(v) for v in wanted if v in present]
    if order != list(range(len(order))):
        steps.append(Step("permute", tuple(order)))
    have = [v for v in wanted if v in present]
    for role in full:
        for v in role:
            if v not in have:
                place_of = sum(1 for w in wanted[: wanted.index(v)] if w in have)
                steps.append(Step("unsqueeze", (place_of,)))
                have.insert(place_of, v)
    if any(v not in present for v in wanted):
        steps.append(Step("expand", (), tuple(v.args[0] for v in wanted)))
    if any(len(role) > 1 for role in full):
        steps.append(Step("reshape", (), tuple(M.mul(*(v.args[0] for v in role)) for role in full)))
    else:
        steps += [Step("unsqueeze", (place,)) for place, role in enumerate(full) if not role]
    return steps


def _split_dimension(extent: Expr, place: Expr, present: list[Expr], steps: list[Step]) -> None:
    """Append the steps that cut one dimension into the variables of its index expression."""
    start: Expr = E.ZERO
    strides: dict[Expr, Expr] = {}
    for atoms, factor in ranges.polynomial(place).items():
        variables = [a for a in atoms if a.op == "var"]
        others = M.mul(E.const(factor), *(a for a in atoms if a.op != "var"))
        if not variables and all(a.op == "size" for a in atoms):
            start = M.add(start, others)
        elif len(variables) == 1 and variables[0] not in strides and factor > 0:
            strides[variables[0]] = others
        else:
            raise NoView
    if start.op == "const" and start.value < 0:
        raise NoView
    ordered = _by_stride(strides)
    dim = len(present)
    whole = True
    for place_in_order, variable in enumerate(ordered):
        stride = strides[variable]
        if stride is E.ONE:
            if place_in_order != len(ordered) - 1:
                raise NoView
            _slice(steps, dim, extent, start, variable, whole)
            present.append(variable)
            return
        outer = M.floordiv(extent, stride)
        if M.mul(outer, stride) is not extent:
            raise NoView
        steps.append(Step("unflatten", (dim,), (outer, stride)))
        _slice(steps, dim, outer, M.floordiv(start, stride), variable, whole and len(ordered) == 1)
        extent, start, whole = stride, M.mod(start, stride), False
        present.append(variable)
        dim += 1
    if not whole and not _fits(M.add(start, E.ONE), extent):
        raise NoView
    steps.append(Step("select", (dim,), (start,)))


def _fits(end: Expr, extent: Expr) -> bool:
    return ranges.is_nonnegative(ranges.subtract(ranges.polynomial(extent), ranges.polynomial(end)))


def _slice(steps: list[Step], dim: int, extent: Expr, start: Expr, variable: Expr, whole: bool) -> None:
    """Cut the variable's range out of a dimension. A whole dimension is known to hold it; of a digit
    that must be shown, or it would spill into the next."""
    length = variable.args[0]
    if start is E.ZERO and length is extent:
        return
    if not whole and not _fits(M.add(start, length), extent):
        raise NoView
    if "mod" in {n.op for n in E.walk(start)}:
        raise NoView
    steps.append(Step("narrow", (dim,), (start, length)))


def _by_stride(strides: dict[Expr, Expr]) -> list[Expr]:
    """Variables from the largest stride to the smallest; each stride divides the one before."""
    ordered = list(strides)
    for place in range(len(ordered)):
        for other in range(place + 1, len(ordered)):
            if _is_multiple(strides[ordered[other]], strides[ordered[place]]):
                ordered[place], ordered[other] = ordered[other], ordered[place]
    for slow, fast in itertools.pairwise(ordered):
        if not _is_multiple(strides[slow], strides[fast]):
            raise NoView
    return ordered


def _is_multiple(a: Expr, b: Expr) -> bool:
    divisor = ranges.polynomial(b)
    return len(divisor) == 1 and not ranges.split_multiples(ranges.polynomial(a), divisor)[1]
