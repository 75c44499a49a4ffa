"""Sums of products, taken apart: what an element of a contraction is."""

from typing import NamedTuple

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import simplify as M


class SumOfProducts(NamedTuple):
    """factor * sum over `summed` of the product of two reads, and what is added to that."""

    factor: float
    summed: tuple[Expr, ...]
    factors: tuple[Expr, ...]
    added: Expr | None = None


def sum_of_products(element: Expr) -> SumOfProducts | None:
    """An element as such a sum; None where it is none."""
    terms = E.parts(element, "add")
    sums = [t for t in terms if M.coefficient(t)[1].op == "sum"]
    rest = [t for t in terms if t not in sums]
    if len(sums) != 1 or len(rest) > 1:
        return None
    factor, whole = M.coefficient(sums[0])
    summed, body = open_sums(whole)
    if body.op != "mul" or len(body.args) != 2 or any(f.op != "read" for f in body.args):
        return None
    return SumOfProducts(factor, summed, body.args, rest[0] if rest else None)


def open_sums(node: Expr) -> tuple[tuple[Expr, ...], Expr]:
    """Nested sums as (variables, body)."""
    variables: list[Expr] = []
    while node.op == "sum":
        variables.append(node.args[0])
        node = node.args[1]
    return tuple(variables), node
