"""The derivative of an expression by a part of it, as another expression, which is computed like any other.

It is built by the chain rule from the derivatives in the operations' rows (`functions.py`).
"""

import functools
import itertools

import torch

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.functions import operation_of
from attngraph.ir.language.parser import expression, operation

ZERO, ONE = E.const(0.0), E.const(1.0)
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


class UnsupportedError(Exception):
    """A program cannot be differentiated, or not be emitted; the message says what is unsupported."""


@functools.lru_cache(maxsize=4096)
def derivative(node: Expr, by: Expr) -> Expr:
    """d node / d by; UnsupportedError where an operation has no derivative."""
    if node is by:
        return ONE
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
        found = added(found, multiplied(_computed(expression(slope, f=node, **names)), part))
    return found


def _computed(slope: Expr) -> Expr:
    """A derivative with what depends on numbers alone computed: that of a power has its exponent's cases."""

    def leaf(node: Expr, args: tuple[Expr, ...]) -> Expr:
        node = E.with_args(node, args)
        row = operation_of(node.op)
        if node.op == "where" and args[0].op == "const":
            return args[1] if args[0].value else args[2]
        if node.op == "pow" and E.is_const(args[1], 1):
            return args[0]
        if row is None or not args or any(a.op != "const" or a is E.NAN for a in args):
            return node
        return E.const(row.torch(*(torch.tensor(a.value, dtype=_DTYPES[type(a.value)]) for a in args)).item())

    return E.rebuild(slope, leaf)


def added(a: Expr, b: Expr) -> Expr:
    """The sum of two expressions, of which one may be 0."""
    return b if a is ZERO else a if b is ZERO else operation("add", a, b)


def multiplied(a: Expr, b: Expr) -> Expr:
    """The product of two expressions, of which one may be 0 or 1."""
    if ZERO in (a, b):
        return ZERO
    return b if a is ONE else a if b is ONE else operation("mul", a, b)
