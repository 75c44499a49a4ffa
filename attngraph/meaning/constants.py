"""The values of a known tensor as a formula of the index.

A buffer that holds a lower triangle, a band, equal blocks, a range, a range whose numbers are repeated, or
a single number is read as that formula. The formula must give every value of the tensor exactly: one entry
that differs, and there is none. An element of integers or booleans at constant indices is a constant,
whatever the pattern.
"""

import torch
from torch import Tensor

from attngraph.ir import budgets
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M


def describe(values: Tensor, at: tuple[Expr, ...]) -> Expr | None:
    """The element of `values` at `at`, or None where its values follow no known pattern."""
    if values.numel() == 0 or values.numel() > budgets.TABLE_ELEMENTS or values.is_complex():
        return None
    first = values.reshape(-1)[0]
    if bool((values == first).all()):
        return E.const(first.item())
    if not values.is_floating_point() and all(place.op == "const" for place in at):
        places = tuple(place.value for place in at)
        inside = all(0 <= place < extent for place, extent in zip(places, values.shape, strict=True))
        return E.const(values[places].item()) if inside else None
    kept = [d for d, extent in enumerate(values.shape) if extent > 1]
    squeezed = values.squeeze()
    if len(kept) == 1:
        return _progression(squeezed, at[kept[0]]) or _repeated(squeezed, at[kept[0]])
    if len(kept) == 2:
        row, column = at[kept[0]], at[kept[1]]
        return _band(squeezed, row, column) or _blocks(squeezed, row, column)
    return None


def _progression(values: Tensor, place: Expr) -> Expr | None:
    """start + step * place, integers only (a float range would have to match to the last bit)."""
    if values.is_floating_point() or values.dtype == torch.bool:
        return None
    start, step = int(values[0]), int(values[1]) - int(values[0])
    steps = torch.arange(values.numel(), device=values.device, dtype=torch.int64)
    last = start + step * (values.numel() - 1)
    if last != int(values[-1]) or not torch.equal(values.to(torch.int64), start + step * steps):
        return None
    return M.add(E.const(start), M.mul(E.const(step), place))


def _repeated(values: Tensor, place: Expr) -> Expr | None:
    """A range, integers only, in which numbers stand several times (0 0 1 1) or begin anew (0 1 0 1)."""
    if values.is_floating_point() or values.dtype == torch.bool:
        return None
    numbers = values.to(torch.int64)
    changes = (numbers[1:] != numbers[:-1]).nonzero().flatten()
    each = int(changes[0]) + 1
    again = (numbers[1:] == numbers[0]).nonzero().flatten()
    steps = torch.arange(len(numbers), device=values.device)
    start, step = int(numbers[0]), int(numbers[each] - numbers[0])
    if each > 1 and torch.equal(numbers, start + step * (steps // each)):
        digit = M.floordiv(place, E.const(each))
    elif each == 1 and len(again) and torch.equal(numbers, start + step * (steps % (int(again[0]) + 1))):
        digit = M.mod(place, E.const(int(again[0]) + 1))
    else:
        return None
    return M.add(E.const(start), M.mul(E.const(step), digit))


def _band(values: Tensor, row: Expr, column: Expr) -> Expr | None:
    """One value where low <= column - row <= high, another elsewhere."""
    rows, columns = values.shape
    corner = values[0, 0]
    marked = values == corner
    for inside in (marked, ~marked):
        limits = _limits(inside)
        if limits is not None:
            break
    else:
        return None
    within, outside = values[inside], values[~inside]
    if not len(outside) or not len(within):
        return None
    if not (bool((outside == outside[0]).all()) and bool((within == within[0]).all())):
        return None
    low, high = limits
    distance = M.sub(column, row)
    conditions = []
    if low > -(rows - 1):
        conditions.append(M.le(E.const(low), distance))
    if high < columns - 1:
        conditions.append(M.le(distance, E.const(high)))
    return M.where(M.and_(*conditions), E.const(within[0].item()), E.const(outside[0].item()))


def _blocks(values: Tensor, row: Expr, column: Expr) -> Expr | None:
    """One value in equal blocks along the diagonal, another elsewhere."""
    first, other = values[0, 0], values[0, -1]
    high, wide = (int((line == first).to(torch.int8).argmin()) for line in (values[:, 0], values[0]))
    if not high or not wide:
        return None
    rows, columns = (torch.arange(n, device=values.device) for n in values.shape)
    same = rows[:, None] // high == columns // wide
    if not torch.equal(values, torch.where(same, first, other)):
        return None
    inside = M.eq(M.floordiv(row, E.const(high)), M.floordiv(column, E.const(wide)))
    return M.where(inside, E.const(first.item()), E.const(other.item()))


def _limits(inside: Tensor) -> tuple[int, int] | None:
    """The least and greatest column - row of the marked entries, if these fill the whole band."""
    top = inside[0].nonzero().flatten()
    left = inside[:, 0].nonzero().flatten()
    if not len(top) and not len(left):
        return None
    high = int(top[-1]) if len(top) else -int(left[0])
    low = -int(left[-1]) if len(left) else int(top[0])
    band = torch.ones_like(inside).tril(high).triu(low)
    return (low, high) if torch.equal(inside, band) else None
