"""What a score says about infinite and undefined products, which a model with finite scores never has.

`torch.nan_to_num(scores)`, `torch.where(scores.isnan(), ...)` and `scores == -inf` before a mask is added ask
whether a product of queries and keys is a number. Results are promised for finite inputs and for scores
within the dtype's range, where it is one.
"""

import math

from attngraph.ir.language import DOT, E, Expr, operation_of
from attngraph.meaning.algebra import M

_STAYS_FINITE = ("add", "mul", "neg", "min", "max", "abs")
"""Besides bounded functions."""


def with_finite_dots(score: Expr) -> Expr:
    """The score with every question answered whether a number that is computed from the dot is NaN or
    infinite. Numbers that are read from tensors are left in doubt: a mask may hold minus infinity."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current.op == "var":
            return current
        built = M.construct(current, args)
        if built.op == "isnan" and _is_finite(built.args[0]):
            return E.FALSE
        if built.op in ("eq", "le") and _compares_with_infinity(built):
            below = built.op == "le" and (built.args[0] is E.NEG_INF or built.args[1] is E.INF)
            return E.TRUE if below else E.FALSE
        return built

    return E.rebuild(score, replace) if any(n is DOT for n in E.walk(score)) else score


def _compares_with_infinity(comparison: Expr) -> bool:
    left, right = comparison.args
    number, other = (left, right) if right in (E.INF, E.NEG_INF) else (right, left)
    return other in (E.INF, E.NEG_INF) and _is_finite(number)


def _is_finite(node: Expr) -> bool:
    """Whether a formula is a number wherever the dot, places and sizes are."""
    if node.op == "const":
        return node is not E.NAN and math.isfinite(node.value)
    if node.op == "where":
        return all(_is_finite(a) for a in node.args[1:])
    row = operation_of(node.op)
    if node.op in _STAYS_FINITE or (row is not None and row.limits is not None):
        return all(_is_finite(a) for a in node.args)
    return node is DOT or node.op in ("var", "size") or node.kind == "int"
