"""Integers of 8 and 16 bits as formulas: where a result may be a number that such an integer does not have,
it wraps around, which is a remainder."""

import torch
from torch import fx

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M, ranges
from attngraph.meaning.rule import Unliftable

NARROW = frozenset({torch.uint8, torch.int8, torch.int16})


def wrapped(value: Expr, in_full: Expr, limits: torch.iinfo) -> Expr:
    """A whole number as an integer of 8 or 16 bits has it, where `in_full` is its formula. Raises
    `Unliftable`: it may be a number that such an integer does not have, and was no integer before."""
    low, high = ranges.bounds(ranges.polynomial(_with_bounds(in_full)))
    numbers = [(x or {}).get((), 0) for x in (low, high) if x is not None and set(x) <= {()}]
    if len(numbers) == 2 and numbers[0] >= limits.min and numbers[1] <= limits.max:
        return value
    if value.kind != "int" or any(n.op == "int" for n in E.walk(in_full)):
        raise Unliftable("integers that may wrap around")
    least, count = E.const(limits.min), E.const(limits.max - limits.min + 1)
    return M.add(M.mod(M.sub(value, least), count), least)


def _with_bounds(value: Expr) -> Expr:
    """A formula with variables that run over what its integers of 8 and 16 bits can be."""

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        is_element = node.op == "read" and isinstance(node.value, fx.Node)
        dtype = node.value.meta["val"].dtype if is_element else None
        if dtype not in NARROW:
            return M.construct(node, args)
        limits = torch.iinfo(dtype)
        element = E.var(f"element of {node}", E.const(limits.max - limits.min + 1))
        return M.add(element, E.const(limits.min))

    return E.rebuild(value, leaf)
