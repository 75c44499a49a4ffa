"""Derivatives of score expressions: how a score follows the dot, or the score before it.

What stands in a statement is an expression of `dot` and `s`; its derivative by one of them is another
expression, which backward kernels write like any other (by the rules of calculus, pointwise).
"""

from __future__ import annotations

import math

from attngraph.codegen.unsupported import UnsupportedError
from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import operation
from attngraph.ir.language.score import DOT, SCORE, Keep, Statement

ZERO, _ONE = E.const(0.0), E.const(1.0)
_STEPS = frozenset({"floor", "ceil", "trunc", "round", "sign", "int", "isnan", "random", "read"})
"""Functions that are constant wherever they have a derivative."""


def formula_of(statement: Statement) -> Expr:
    """What a statement puts in the score's place: of a mask, where it hides."""
    return statement.fill if isinstance(statement, Keep) else statement.value


def slopes(statement: Statement, *, is_first: bool) -> tuple[Expr, Expr]:
    """The derivatives of a statement's formula by the score before it and by the dot. Before the first
    statement the score is the dot, and the first counts.

    Raises:
        UnsupportedError: as `derivative`.
    """
    formula = formula_of(statement)
    if not is_first:
        return derivative(formula, SCORE), derivative(formula, DOT)

    def join(node: Expr, args: tuple[Expr, ...]) -> Expr:
        return DOT if node is SCORE else E.make(node.op, args, node.value, node.kind) if args else node

    return derivative(E.rebuild(formula, join), DOT), ZERO


def derivative(node: Expr, by: Expr) -> Expr:
    """d node / d by.

    Raises:
        UnsupportedError: an operation whose derivative is not written yet.
    """
    if node is by:
        return _ONE
    is_step = node.kind == "bool" or node.op in _STEPS
    if is_step or all(n is not by for n in E.walk(node)):
        return ZERO
    if node.op == "where":
        condition, yes, no = node.args
        a, b = derivative(yes, by), derivative(no, by)
        return ZERO if a is b is ZERO else operation("where", condition, a, b)
    parts = [derivative(arg, by) for arg in node.args]
    match node.op, node.args, parts:
        case "add", _, [a, b]:
            return _sum(a, b)
        case "sub", _, [a, b]:
            return _sum(a, _product(E.const(-1.0), b))
        case "neg", _, [a]:
            return _product(E.const(-1.0), a)
        case "mul", [x, y], [a, b]:
            return _sum(_product(a, y), _product(x, b))
        case "div", [x, y], [a, b]:
            if b is ZERO:
                return _product(a, operation("div", _ONE, y))
            return operation("div", _sum(_product(a, y), _product(E.const(-1.0), _product(x, b))), _square(y))
        case "pow", [x, y], [a, b]:
            lower = operation("mul", y, operation("pow", x, operation("sub", y, _ONE)))
            rate = operation("mul", node, operation("log", x))
            by_power = operation("where", operation("eq", x, ZERO), ZERO, rate)
            by_base = ZERO if E.is_const(y, 0) else _product(lower, a)
            return _sum(by_base, _product(by_power, b))
        case "min" | "max", [x, y], [a, b]:
            return _sum(_product(_share(node.op, x, y), a), _product(_share(node.op, y, x), b))
        case "mod", _, [a, b] if b is ZERO:
            return a
        case "float", _, [a]:
            return a
        case _, [x], [a]:
            return _product(_outer(node, x), a)
    raise UnsupportedError(f"the derivative of `{node.op}`")


def _outer(node: Expr, x: Expr) -> Expr:
    """The derivative of a function of one argument by that argument."""
    minus = operation("sub", _ONE, _square(node))
    match node.op:
        case "tanh":
            return minus
        case "sigmoid":
            return operation("mul", node, operation("sub", _ONE, node))
        case "exp":
            return node
        case "exp2":
            return operation("mul", E.const(math.log(2)), node)
        case "log":
            return operation("div", _ONE, x)
        case "log2":
            return operation("div", E.const(1 / math.log(2)), x)
        case "rsqrt":
            return operation("div", operation("mul", E.const(-0.5), node), x)
        case "sqrt":
            return operation("div", E.const(0.5), node)
        case "sin":
            return operation("cos", x)
        case "cos":
            return operation("neg", operation("sin", x))
        case "erf":
            bell = operation("exp", operation("neg", _square(x)))
            return operation("mul", E.const(2 / math.sqrt(math.pi)), bell)
        case "abs":
            return operation("float", operation("sign", x)) if x.kind == "int" else operation("sign", x)
    raise UnsupportedError(f"the derivative of `{node.op}`")


def _share(op: str, own: Expr, other: Expr) -> Expr:
    """The derivative of the lesser or the greater of two by one of them: half where they are equal, as in
    PyTorch."""
    loses = operation("gt" if op == "min" else "lt", own, other)
    rest = operation("where", loses, ZERO, _ONE)
    return operation("where", operation("eq", own, other), E.const(0.5), rest)


def _square(x: Expr) -> Expr:
    return operation("mul", x, x)


def _sum(a: Expr, b: Expr) -> Expr:
    return b if a is ZERO else a if b is ZERO else operation("add", a, b)


def _product(a: Expr, b: Expr) -> Expr:
    if ZERO in (a, b):
        return ZERO
    return b if a is _ONE else a if b is _ONE else operation("mul", a, b)
