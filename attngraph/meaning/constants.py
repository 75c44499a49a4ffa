"""Tensors that depend on no input of a call, and formulas of their values: masks that a loop wrote row by
row, tables put together from blocks, anything computed from fixed sizes and known tensors.

Such a tensor is computed once, as the model would. One that holds a lower triangle, a band, equal blocks, a
range, a range whose numbers are repeated, or a single number is then read as that formula. The formula must
give every value of the tensor exactly: one entry that differs, and there is none. An element of integers or
booleans at constant indices is a constant, whatever the pattern. `element.py` uses this where an op has no
element rule, or where so many ops wrote one table that their rules would give a formula as long as the table.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.kept import kept
from attngraph.ir.language import E, Expr
from attngraph.ir.walk import computed, filled, reached
from attngraph.meaning.algebra import M, size_expression
from attngraph.meaning.rule import RULES, Category


class ConstantFolding:
    """The values of one graph that are the same in every call.

    Args:
        given: the tensors that are known when compiling, by placeholder.
    """

    def __init__(self, given: Mapping[fx.Node, Tensor]) -> None:
        self.given = given
        self._writers: dict[fx.Node, frozenset[fx.Node] | None] = {}

    def writers(self, node: fx.Node) -> frozenset[fx.Node] | None:
        """The ops and known tensors that a value is computed from; None where it depends on an input, a
        varying size or a random number. Where there are more than `budgets.TABLE_OPS`, some are left out."""

        def operands(n: fx.Node) -> list[fx.Node]:
            return _operands(n) if self._is_fixed(n) else []

        return filled(self._writers, node, operands, self._gathered)

    @kept
    def values(self, node: fx.Node) -> Tensor | None:
        """The value of the node, equal in every call, or None where it is not known."""
        return None if self.writers(node) is None else self._computed(node)

    def sources(self, node: fx.Node) -> frozenset[fx.Node]:
        """The given tensors that known values were computed from."""
        return frozenset(n for n in reached([node], _operands) if n in self.given)

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether the node by itself, apart from its operands, gives the same value in every call."""
        if node.op == "placeholder":
            return node in self.given
        if node.op != "call_function" or any(_varies(a) for a in (*node.args, *node.kwargs.values())):
            return False
        value = node.meta.get("val")
        tensors = value if isinstance(value, (tuple, list)) else (value,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                return False
            if any(map(_varies, tensor.shape)) or tensor.numel() > budgets.TABLE_ELEMENTS:
                return False
        if node.target is operator.getitem:
            return True
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags

    def _gathered(self, node: fx.Node) -> frozenset[fx.Node] | None:
        if not self._is_fixed(node):
            return None
        found = {node}
        for operand in _operands(node):
            theirs = self._writers[operand]
            if theirs is None:
                return None
            if len(found) <= budgets.TABLE_OPS:
                found |= theirs
        return frozenset(found)

    def _computed(self, node: fx.Node) -> Tensor | None:
        """The value, or None where it depends on uninitialised memory (`torch.empty`)."""
        needed = set(reached([node], _operands))
        order = [n for n in node.graph.nodes if n in needed]
        result = self._run(order, 0)
        if any("empty" in str(n.target) for n in order) and not torch.equal(result, self._run(order, 1)):
            return None
        return result

    def _run(self, order: Sequence[fx.Node], unwritten: int) -> Tensor:
        """The last value of `order`; uninitialised memory is filled with the number `unwritten`."""

        def compute(node: fx.Node, made: Mapping[fx.Node, Any]) -> Any:
            return self.given[node] if node in self.given else _run(node, made, unwritten)

        with torch.no_grad():
            result: Tensor = computed(order, _operands, compute, order[-1:])[0]
        return result


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose values the node's value depends on."""
    return [n for n in node.all_input_nodes if n is not _pattern(node) and _is_data(n.meta.get("val"))]


def _is_data(value: Any) -> bool:
    """Whether a value is a tensor or several tensors, not a size."""
    return isinstance(value, (Tensor, tuple, list))


def _pattern(node: fx.Node) -> Any:
    """The operand from which an op takes only dtype and device (`zeros_like`), if it has one."""
    rule = RULES.get(str(node.target))
    from_index = node.op == "call_function" and rule is not None and rule.category is Category.INDEX
    return node.args[0] if from_index and node.args and node.args[0] not in node.args[1:] else None


def _varies(argument: Any) -> bool:
    """Whether an argument of an op is, or contains, a symbolic size or an example of one."""
    if isinstance(argument, (list, tuple)):
        return any(_varies(a) for a in argument)
    if isinstance(argument, int):
        return size_expression(argument).op != "const"
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        return value is None or (not _is_data(value) and _varies(value))
    symbolic = isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return symbolic and not argument.node.expr.is_number


def _run(node: fx.Node, made: Mapping[fx.Node, Any], unwritten: int) -> Any:
    """The value of one op. An operand that only gives a dtype is replaced by one of the result's shape."""

    def value(operand: fx.Node) -> Any:
        if operand in made:
            return made[operand]
        given = operand.meta["val"]
        if not isinstance(given, Tensor):
            return float(given) if isinstance(given, (float, torch.SymFloat)) else int(given)
        return torch.empty(node.meta["val"].shape, dtype=given.dtype, device=given.device)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    target: Any = node.target
    result = target(*args, **kwargs)
    return result.fill_(unwritten) if "empty" in str(target) else result


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
    if len(kept) == 1 and not values.is_floating_point() and values.dtype != torch.bool:
        # Integers only: a float range would have to match to the last bit.
        return _range(squeezed.to(torch.int64), at[kept[0]])
    if len(kept) == 2:
        row, column = at[kept[0]], at[kept[1]]
        return _band(squeezed, row, column) or _blocks(squeezed, row, column)
    return None


def _range(numbers: Tensor, place: Expr) -> Expr | None:
    """start + step * place, or a range in which numbers stand several times (0 0 1 1) or begin anew
    (0 1 0 1)."""
    places = torch.arange(len(numbers), device=numbers.device)
    changes = (numbers[1:] != numbers[:-1]).nonzero().flatten()
    again = (numbers[1:] == numbers[0]).nonzero().flatten()
    each, period = int(changes[0]) + 1, int(again[0]) + 1 if len(again) else 0
    start, step = int(numbers[0]), int(numbers[each] - numbers[0])
    last = start + step * ((len(numbers) - 1) // each)  # integers of a tensor may wrap around
    if last == int(numbers[-1]) and torch.equal(numbers, start + step * (places // each)):
        digit = M.floordiv(place, E.const(each)) if each > 1 else place
    elif each == 1 and period and torch.equal(numbers, start + step * (places % period)):
        digit = M.mod(place, E.const(period))
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
