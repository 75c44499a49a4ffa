"""Rules of operations on the bits of integers, in words of arithmetic.

In two's complement `x >> n` is `x // 2**n`, and `x & (2**n - 1)` is `x % 2**n`, for negative numbers too: so
digits of packed integers are written by quotients and remainders, whatever the model wrote. A mask of
neighbouring bits is one digit in its place; other masks, and operations on the bits of two tensors, have no
rule.
"""

from collections.abc import Callable
from typing import Any

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import Indices, Unliftable
from attngraph.meaning.rules.pointwise import overloads, register

_MOST = 62
"""The most bits by which a number is moved: 2 to that power is a 64-bit integer."""


def _power(count: int) -> Expr:
    if not 0 <= count <= _MOST:
        raise Unliftable(f"a shift by {count} bits")
    return E.const(1 << count)


def _masked(value: Expr, mask: int) -> Expr:
    """The bits of a number that are set in the mask: neighbouring ones, or all from one on."""
    if mask == 0:
        return E.const(0)
    low = (mask & -mask).bit_length() - 1
    high = mask >> low
    if high & (high + 1):
        raise Unliftable("a mask of several groups of bits")
    digits = M.floordiv(value, _power(low))
    if mask > 0:
        digits = M.mod(digits, _power(high.bit_length()))
    return M.mul(digits, _power(low))


def _turned_over(value: Expr, bit: int) -> Expr:
    """The number with one bit the other way round."""
    if bit <= 0 or bit & (bit - 1):
        raise Unliftable("several bits the other way round")
    place = E.const(bit)
    is_set = M.mod(M.floordiv(value, place), E.const(2))
    return M.add(value, place, M.mul(E.const(-2 * bit), is_set))


def _with_number(a: Expr, b: Expr, of: Callable[[Expr, int], Expr]) -> Expr:
    for value, number in ((a, b), (b, a)):
        if number.op == "const" and number.kind == "int":
            return of(value, int(number.value))
        if number.op == "where" and all(n.op == "const" for n in number.args[1:]):
            return M.where(number.args[0], *(of(value, int(n.value)) for n in number.args[1:]))
    raise Unliftable("an operation on the bits of two numbers")


def _and(a: Expr, b: Expr) -> Expr:
    return M.and_(a, b) if a.kind == b.kind == "bool" else _with_number(M.number(a), M.number(b), _masked)


def _or(a: Expr, b: Expr) -> Expr:
    if a.kind != "bool" or b.kind != "bool":
        raise Unliftable("an operation on the bits of two numbers")
    return M.or_(a, b)


def _xor(a: Expr, b: Expr) -> Expr:
    if a.kind == b.kind == "bool":
        return M.where(a, M.not_(b), b)
    return _with_number(M.number(a), M.number(b), _turned_over)


def _shifted(by: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    """A shift by a number, or by one of few numbers that follow from the index."""

    def build(value: Expr, count: Expr) -> Expr:
        value, count = M.number(value), M.number(count)
        if count.op == "where":
            condition, yes, no = count.args
            return M.where(condition, build(value, yes), build(value, no))
        if count.op == "const" and count.kind == "int":
            return by(value, _power(int(count.value)))
        if count.kind != "int" or any(n.op == "read" for n in E.walk(count)):
            raise Unliftable("a shift by a number that follows from data")
        return by(value, E.make("pow", (E.const(2), count), None, "int"))

    return build


def _operand(context: Meaning, value: Any, at: Indices) -> Expr:
    """A number, a formula of the index alone, or an element of a tensor."""
    if not context.is_tensor(value):
        return context.scalar(value)
    place = at[len(at) - len(context.shape(value)) :]
    found = context.index_expression(value, place) if context.kind(value) == "int" else None
    return context.read(value, place) if found is None else found


register(overloads("bitwise_and", "__and__"), _and, 2, _operand)
register(overloads("bitwise_or", "__or__"), _or, 2, _operand)
register(overloads("bitwise_xor", "__xor__"), _xor, 2, _operand)
for _name, _by in (("left", M.mul), ("right", M.floordiv)):
    _names = (f"bitwise_{_name}_shift.Tensor", f"bitwise_{_name}_shift.Tensor_Scalar")
    register((*_names, *overloads(f"__{_name[0]}shift__")), _shifted(_by), 2, _operand)
