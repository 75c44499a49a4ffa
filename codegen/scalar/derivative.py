"""Derivatives of score expressions: by the dot, or by the score before it.

A statement's formula is an expression of `dot` and `s`; its derivative by one of them is another expression,
which backward kernels emit like any other. It is built by the chain rule from the derivatives in the
operations' rows (`ir/language/functions.py`).
"""

import functools
import itertools

from attngraph.codegen.remarks import UnsupportedError
from attngraph.ir.language import DOT, SCORE, E, Expr, Keep, Statement, expression, operation, operation_of

ZERO, _ONE = E.const(0.0), E.const(1.0)


def formula_of(statement: Statement) -> Expr:
    """The formula that replaces the score: for a mask, its fill."""
    return statement.fill if isinstance(statement, Keep) else statement.value


def slopes(statement: Statement, *, is_first: bool) -> tuple[Expr, Expr]:
    """The derivatives of a statement's formula by the score before it and by the dot. In the first
    statement the score is the dot: the first result is the whole derivative, the second is zero.

    Raises:
        UnsupportedError: as `derivative`.
    """
    formula = formula_of(statement)
    if not is_first:
        return derivative(formula, SCORE), derivative(formula, DOT)

    return derivative(E.replaced(formula, {SCORE: DOT}), DOT), ZERO


@functools.lru_cache(maxsize=4096)
def derivative(node: Expr, by: Expr) -> Expr:
    """d node / d by.

    Raises:
        UnsupportedError: an operation without a derivative.
    """
    if node is by:
        return _ONE
    if node.kind == "bool" or node.op == "read" or all(n is not by for n in E.walk(node)):
        return ZERO
    if node.op == "where":
        yes, no = (derivative(arg, by) for arg in node.args[1:])
        return ZERO if yes is no is ZERO else operation("where", node.args[0], yes, no)
    row, found = operation_of(node.op), ZERO
    slopes = row.slopes if row is not None else ()
    for arg, slope in itertools.zip_longest(node.args, slopes):
        part = ZERO if slope == "0.0" else derivative(arg, by)
        if part is ZERO:
            continue
        if slope is None:
            raise UnsupportedError(f"the derivative of `{node.op}`")
        names = dict(zip("xy", node.args, strict=False))
        found = _sum(found, _product(expression(slope, f=node, **names), part))
    return found


def _sum(a: Expr, b: Expr) -> Expr:
    return b if a is ZERO else a if b is ZERO else operation("add", a, b)


def _product(a: Expr, b: Expr) -> Expr:
    if ZERO in (a, b):
        return ZERO
    return b if a is _ONE else a if b is _ONE else operation("mul", a, b)
