"""Elements of a matrix that are digits of 4 bits of an integer: how they lie in it.

An element is known as a formula of integers that are read, `b[o, d // 2] // 2**(4 * (d % 2)) % 16 - 8` say.
One index is taken apart, `d = (block * count + n) * run + place`: if all elements that differ in n alone read
the same integer, the formula for each n is a function of that one integer, and its values say which digit it
is and what the digit stands for. So it does not matter how the model writes that.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from attngraph.ir.language import E, Expr
from attngraph.ir.language.packed import BITS, Packed
from attngraph.meaning.algebra import simplify as M

_TRIED = 200
"""So many integers of several bytes are tried; of one byte all are."""
_LARGEST_OFFSET = 64
"""What may be subtracted from a digit."""
_ELEMENT = E.read("an element", (), "int")


class Digits(NamedTuple):
    """The integer that is read for an element, at indices over rows and columns of such integers."""

    packed: Packed
    read: Expr
    rows: tuple[Expr, ...]
    columns: tuple[Expr, ...]


def find_digits(value: Expr, out: Expr, over: Expr, dtype: torch.dtype) -> Digits | None:
    """How the elements of a matrix `[out, over]` lie in integers of this dtype; None if they are no digits of
    them, or lie in another way than `Packed` can say."""
    each = torch.iinfo(dtype).bits // BITS
    for of_outputs in (False, True) if each == 2 else (False,):
        index, other = (out, over) if of_outputs else (over, out)
        for run in _runs(value, index, each):
            found = _taken_apart(value, index, run, each)
            if found is None:
                continue
            read, places, digits = found
            packed = _packed(digits, run, of_outputs, dtype) if read.free <= {other, *places} else None
            if packed is not None:
                rows, columns = (places, (other,)) if of_outputs else ((other,), places)
                return Digits(packed, read, rows, columns)
    return None


def _runs(value: Expr, index: Expr, each: int) -> Iterator[int]:
    """How far apart the digits of one integer may be, by the numbers that occur in the formula."""
    if index.op != "var" or not index.args or index.args[0].op != "const":
        return
    numbers = {n.value for n in E.walk(value) if n.op == "const" and isinstance(n.value, int) and n.value > 0}
    runs = {1, *numbers, *(n // each for n in numbers)} if each == 2 else {1}
    yield from sorted(n for n in runs if n and index.args[0].value % (each * n) == 0)


_Apart = tuple[Expr, tuple[Expr, ...], tuple[Expr, ...]]


def _taken_apart(value: Expr, index: Expr, run: int, each: int) -> _Apart | None:
    """The integer that is read, at which places, and the formula of each of its digits, in terms of
    `_ELEMENT`."""
    block, place = (E.var(name, E.const(n)) for name, n in
                    (("block", index.args[0].value // (run * each)), ("place", run)))  # fmt: skip
    places = tuple(v for v in (block, place) if not E.is_const(v.args[0], 1))
    at = [v if v in places else E.ZERO for v in (block, place)]
    digits: list[Expr] = []
    read: Expr | None = None
    for n in range(each):
        whole = M.add(M.mul(M.add(M.mul(at[0], E.const(each)), E.const(n)), E.const(run)), at[1])
        element = M.substitute(value, {index: whole})
        reads = {node for node in E.walk(element) if node.op == "read"}
        if len(reads) != 1 or (read is not None and reads != {read}):
            return None
        (read,) = reads
        digits.append(M.substitute(element, {read: _ELEMENT}))
        if digits[-1].free:
            return None
    assert read is not None
    return read, places, tuple(digits)


@functools.lru_cache(maxsize=256)
def _packed(digits: tuple[Expr, ...], run: int, of_outputs: bool, dtype: torch.dtype) -> Packed | None:
    """How digits lie, by the values of their formulas."""
    limits = torch.iinfo(dtype)
    tried: Sequence[int] = range(limits.min, limits.max + 1)
    if limits.bits > 8:
        drawn = random.Random(0)
        tried = [limits.min, limits.max, *(drawn.randint(limits.min, limits.max) for _ in range(_TRIED))]
    for signed in (False, True):
        found = [_digit(formula, tried, signed, limits.bits // BITS) for formula in digits]
        for high_first in (False, True):
            wanted = [n ^ high_first for n in range(len(digits))]
            if [f and f[0] for f in found] == wanted and len({f and f[1] for f in found}) == 1:
                assert found[0] is not None
                return Packed(run, high_first, signed, found[0][1], of_outputs)
    return None


def _digit(formula: Expr, tried: Sequence[int], signed: bool, count: int) -> tuple[int, int] | None:
    """Which of an integer's digits a formula is, counted from the lowest, and what is subtracted from it."""
    values = []
    for number in tried:
        value = M.substitute(formula, {_ELEMENT: E.const(number)})
        if value.op != "const" or value.value != int(value.value):
            return None
        values.append(int(value.value))
    for place in range(count):
        plain = [number >> BITS * place & 15 for number in tried]
        if signed:
            plain = [(digit ^ 8) - 8 for digit in plain]
        apart = {digit - value for digit, value in zip(plain, values, strict=True)}
        if len(apart) == 1 and abs(less := apart.pop()) <= _LARGEST_OFFSET:
            return place, less
    return None
