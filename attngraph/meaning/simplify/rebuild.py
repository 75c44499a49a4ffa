"""Rebuilding expressions through the canonical constructors: substitution, names of bound variables."""

from __future__ import annotations

from collections.abc import Mapping

from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.meaning import simplify as M

_CONSTRUCTORS = {
    op: op for op in ("add", "mul", "recip", "floordiv", "mod", "le", "lt", "eq", "where", "exp", "log")
}
_CONSTRUCTORS |= {
    "not": "not_",
    "and": "and_",
    "or": "or_",
    "pow": "power",
    "abs": "absolute",
    "sum": "total",
}
"""The constructor of each operation that has an algebra, by its name in this package."""


def construct(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` with new arguments, in canonical form."""
    if args == node.args:
        return node
    if node.op == "read":
        return E.read(node.value, args, node.kind)
    if node.op == "raw":
        return raw(node.value, *args)
    if node.op in _CONSTRUCTORS:
        found: Expr = getattr(M, _CONSTRUCTORS[node.op])(*args)
        return found
    if node.op == "random" or node.op in E.BINDERS:
        return E.make(node.op, args, node.value, node.kind)
    return M.function(node.op, *args) if args else node


def raw(name: str, *args: Expr) -> Expr:
    """An operation that is to be done as it stands: no algebra looks into it."""
    return E.make("raw", args, name, "float")


def canonical_binders(node: Expr) -> Expr:
    """`node` with its bound variables renamed by depth, so that two expressions that differ only
    in the names of bound variables become the same object."""
    done: dict[tuple[Expr, int], Expr] = {}

    def rename(current: Expr, depth: int) -> Expr:
        key = (current, depth)
        if key not in done:
            if current.op in E.BINDERS:
                bound = E.var(f"_{depth}", current.args[0].args[0])
                body = rename(substitute(current.args[1], {current.args[0]: bound}), depth + 1)
                done[key] = E.make(current.op, (bound, body), None, current.kind)
            elif current.op == "var" or not current.args:
                done[key] = current
            else:
                done[key] = construct(current, tuple(rename(a, depth) for a in current.args))
        return done[key]

    return rename(node, 0)


def substitute(node: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """`node` with each key replaced by its value, in canonical form. A variable's own extent is
    left alone."""

    def replace(current: Expr, args: tuple[Expr, ...]) -> Expr:
        if current in mapping:
            return mapping[current]
        return current if current.op == "var" else construct(current, args)

    return E.rebuild(node, replace)
