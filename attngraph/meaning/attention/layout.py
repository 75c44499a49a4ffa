"""From index expressions back to views: how to see a tensor as `[role, role, ...]` without copying.

The recogniser knows an operand as "element (e0, e1, ...) of this tensor", each e an expression over
index variables. `solve` finds the chain of unflatten, slice, select, permute, expand and reshape
operations that presents those elements in the wanted order, or says that there is none.
"""

import dataclasses
import itertools
from collections.abc import Iterable

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M, ranges
from attngraph.meaning.algebra.digits import nested

Roles = tuple[tuple[Expr, ...], ...]


@dataclasses.dataclass(frozen=True)
class ViewOp:
    """One view operation; `sizes` are size expressions, `dims` plain numbers."""

    op: str
    dims: tuple[int, ...] = ()
    sizes: tuple[Expr, ...] = ()


class NoView(Exception):
    """These elements are not a view of the tensor."""


def solve(shape: tuple[Expr, ...], index: tuple[Expr, ...], roles: Roles) -> tuple[ViewOp, ...]:
    """The views that turn a tensor of `shape` into one dimension per role, such that the element at the
    roles' indices is the tensor's element at `index`.

    Args:
        roles: for each wanted dimension the variables it runs over, slowest first. Over variables that the
            index does not use, the tensor is expanded.

    The index must be in range for all values of its variables (as it is for elements that a graph
    reads): that is not checked again here.

    Raises:
        NoView: some index is no combination of digits (a flip, a gather, overlapping windows).
    """
    roles, index = _with_units(shape, *_merge_digits(roles, index))
    steps: list[ViewOp] = []
    present: list[Expr] = []
    for extent, place in zip(shape, index, strict=True):
        _split_dimension(extent, place, present, steps)
    if len(set(present)) != len(present):
        raise NoView
    wanted = [v for role in roles for v in role]
    if any(v not in wanted for v in present):
        raise NoView
    order = [present.index(v) for v in wanted if v in present]
    if order != list(range(len(order))):
        steps.append(ViewOp("permute", tuple(order)))
    missing = [place for place, v in enumerate(wanted) if v not in present]
    steps += [ViewOp("unsqueeze", (place,)) for place in missing]
    if missing:
        steps.append(ViewOp("expand", (), tuple(v.args[0] for v in wanted)))
    if any(len(role) > 1 for role in roles):
        steps.append(ViewOp("reshape", (), tuple(M.mul(*(v.args[0] for v in role)) for role in roles)))
    else:
        steps += [ViewOp("unsqueeze", (place,)) for place, role in enumerate(roles) if not role]
    return tuple(steps)


def _with_units(
    shape: tuple[Expr, ...], roles: Roles, index: tuple[Expr, ...]
) -> tuple[Roles, tuple[Expr, ...]]:
    """Roles over nothing run over dimensions of extent 1, which are then not taken out and put in again."""
    free = [d for d, extent in enumerate(shape) if E.is_const(extent, 1) and index[d] is E.ZERO]
    units = {d: _unit(n) for n, d in enumerate(free[: sum(not role for role in roles)])}
    return _filled(roles, units.values()), tuple(units.get(d, place) for d, place in enumerate(index))


def paired(one: Roles, other: Roles) -> tuple[Roles, Roles]:
    """Both, with the same digits of extent 1 at the first empty places of each."""
    count = min(sum(not role for role in roles) for roles in (one, other))
    units = [_unit(n) for n in range(count)]
    return _filled(one, units), _filled(other, units)


def _unit(number: int) -> Expr:
    return E.var(f"unit {number}", E.ONE)


def _filled(roles: Roles, units: Iterable[Expr]) -> Roles:
    """The roles, of which as many empty ones as there are units have one each."""
    left = iter(units)
    return tuple(role or tuple(itertools.islice(left, 1)) for role in roles)


def _merge_digits(wanted: Roles, index: tuple[Expr, ...]) -> tuple[Roles, tuple[Expr, ...]]:
    """Join neighbouring digits of a role that the index only ever uses together."""
    merged: list[tuple[Expr, ...]] = []
    for role in wanted:
        kept: list[Expr] = []
        for fast in role:
            kept.append(fast)
            if len(kept) < 2:
                continue
            slow = kept[-2]
            both = E.var(f"{slow.value}&{fast.value}", M.mul(slow.args[0], fast.args[0]))
            tried = [_replace_pair(i, slow, fast, both) for i in index]
            if None not in tried:
                index = tuple(t for t in tried if t is not None)
                kept[-2:] = [both]
        merged.append(tuple(kept))
    return tuple(merged), index


def _replace_pair(index: Expr, slow: Expr, fast: Expr, both: Expr) -> Expr | None:
    """`index` with slow * extent(fast) + fast written as `both`; None where they occur otherwise."""
    if slow not in index.free and fast not in index.free:
        return index
    if slow not in index.free or fast not in index.free:
        return None
    replaced = M.substitute(index, {slow: E.ZERO, fast: both})
    spelled = M.substitute(replaced, {both: M.add(M.mul(slow, fast.args[0]), fast)})
    return replaced if spelled is index else None


def _split_dimension(extent: Expr, place: Expr, present: list[Expr], steps: list[ViewOp]) -> None:
    """Append the views that cut one dimension into the variables of its index expression."""
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
    by_stride = {stride: variable for variable, stride in strides.items()}
    ordered = nested(by_stride)
    if ordered is None or len(ordered) != len(strides):
        raise NoView
    whole = True
    for stride in reversed(ordered):
        variable, dim = by_stride[stride], len(present)
        present.append(variable)
        if stride is E.ONE:  # the last
            _slice(steps, dim, extent, start, variable, whole)
            return
        outer = M.floordiv(extent, stride)
        if M.mul(outer, stride) is not extent:
            raise NoView
        steps.append(ViewOp("unflatten", (dim,), (outer, stride)))
        _slice(steps, dim, outer, M.floordiv(start, stride), variable, whole and len(ordered) == 1)
        extent, start, whole = stride, M.mod(start, stride), False
    if not whole and not ranges.is_at_most(M.add(start, E.ONE), extent):
        raise NoView
    steps.append(ViewOp("select", (len(present),), (start,)))


def _slice(steps: list[ViewOp], dim: int, extent: Expr, start: Expr, variable: Expr, whole: bool) -> None:
    """Slice the variable's range out of a dimension. A whole dimension is known to contain it; for a digit
    this must be proved, or the range would reach into the next digit."""
    length = variable.args[0]
    if start is E.ZERO and length is extent:
        return
    end = M.add(start, length)
    if not whole and not ranges.is_at_most(end, extent):
        raise NoView
    if ranges.is_positive(ranges.subtract(ranges.polynomial(end), ranges.polynomial(extent))):
        raise NoView  # a part of the tensor that only some of the indices belong to
    if any(n.op == "mod" for n in E.walk(start)):
        raise NoView
    steps.append(ViewOp("narrow", (dim,), (start, length)))
