"""Rebuilding expressions through the canonical constructors: substitution, names of bound variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.meaning import simplify as M

_CONSTRUCT: dict[str, Callable[..., Expr]] = {
    "add": M.add, "mul": M.mul, "recip": M.recip, "floordiv": M.floordiv, "mod": M.mod, "le": M.le,
    "lt": M.lt, "eq": M.eq, "not": M.not_, "and": M.and_, "or": M.or_, "where": M.where, "exp": M.exp,
    "log": M.log, "pow": M.power, "abs": M.absolute, "sum": M.total,
}  # fmt: skip


def construct(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` with new arguments, in canonical form."""
    if args == node.args:
        return node
    if node.op == "read":
        return E.read(node.value, args, node.kind)
    if node.op in _CONSTRUCT:
        return _CONSTRUCT[node.op](*args)
    if node.op == "random" or node.op in E.BINDERS:
        return E.make(node.op, args, node.value, node.kind)
    return M.function(node.op, *args) if args else node


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
