"""Index variables as digits: `h // 4` and `h % 4` are one variable of two digits.

Views that join or split dimensions divide index variables. Splitting a variable into the digits that
are used of it turns those divisions into plain variables again.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from attngraph.ir.language import E, Expr, operation_of
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M

Digits = tuple[Expr, ...]
"""The digits of one variable (or of several, one after the other), slowest first."""


def split_digits(variables: Iterable[Expr], expressions: Iterable[Expr]) -> dict[Expr, Digits] | None:
    """For every variable that some expression divides (`v // c`, `v % c`), its digits, slowest
    first; None where the divisors do not divide one another."""
    cuts: dict[Expr, list[Expr]] = {}
    for expression in expressions:
        for node in E.walk(expression):
            if node.op in ("floordiv", "mod") and node.args[0].op == "var":
                found = cuts.setdefault(node.args[0], [])
                if node.args[1] not in found:
                    found.append(node.args[1])
    digits: dict[Expr, Digits] = {}
    for variable in variables:
        if variable not in cuts:
            continue
        bounds = nested([*cuts[variable], variable.args[0]])
        if bounds is None:
            return None
        parts: list[Expr] = []
        below: Expr = E.ONE
        for place, bound in enumerate(bounds):
            extent = M.floordiv(bound, below)
            if M.mul(extent, below) is not bound:
                return None
            parts.append(E.var(f"{variable.value}.{place}", extent))
            below = bound
        digits[variable] = tuple(p for p in reversed(parts) if not E.is_const(p.args[0], 1))
    return digits


def nested(bounds: Iterable[Expr]) -> list[Expr] | None:
    """Different numbers in an order in which each divides the next; None where there is none."""
    ordered: list[Expr] = []
    for bound in dict.fromkeys(bounds):
        place = 0
        while place < len(ordered) and divides(ordered[place], bound):
            place += 1
        ordered.insert(place, bound)
    if any(not divides(a, b) for a, b in itertools.pairwise(ordered)):
        return None
    return ordered


def divides(a: Expr, b: Expr) -> bool:
    divisor = ranges.polynomial(a)
    return len(divisor) == 1 and not ranges.split_multiples(ranges.polynomial(b), divisor)[1]


def taken_apart(index: Expr, digits: Digits) -> dict[Expr, Expr]:
    """What each digit of an index is, which counts all of them; slowest first."""
    found: dict[Expr, Expr] = {}
    below: Expr = E.ONE
    for digit in reversed(digits):
        value = M.floordiv(index, below)
        found[digit] = value if digit is digits[0] else M.mod(value, digit.args[0])
        below = M.mul(below, digit.args[0])
    return found


def recombined(digits: Digits) -> Expr:
    """The index that digits make up, slowest first."""
    value: Expr = E.ZERO
    for digit in digits:
        value = M.add(M.mul(value, digit.args[0]), digit)
    return value


def extent(digits: Digits) -> Expr:
    return M.mul(*(d.args[0] for d in digits))


def numbers(index: Expr, values: Mapping[Expr, Tensor]) -> Tensor:
    """What an index is for many values of its variables."""
    if index in values:
        return values[index]
    if index.op == "const":
        return torch.tensor(index.value)
    operation, args = operation_of(index.op), [numbers(a, values) for a in index.args]
    assert operation is not None
    return functools.reduce(operation.torch, args) if operation.arity == 2 else operation.torch(*args)
