"""Rebuilding expressions through the canonical constructors: substitution, names of bound variables."""

from collections.abc import Callable, Mapping

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import simplify as M

_CONSTRUCTORS = {
    op: op for op in ("add", "mul", "recip", "floordiv", "mod", "le", "lt", "eq", "where", "exp", "log")
}
_CONSTRUCTORS |= {
    "not": "not_", "and": "and_", "or": "or_", "pow": "power", "abs": "absolute", "sum": "total",
}  # fmt: skip
"""The constructor of each operation that has an algebra, by its name in this package."""


def construct(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` with new arguments, in canonical form. The extents of variables stay."""
    if args == node.args or node.op == "var":
        return node
    if node.op in _CONSTRUCTORS:
        found: Expr = getattr(M, _CONSTRUCTORS[node.op])(*args)
        return found
    if node.op in ("read", "raw", "random", *E.BINDERS):
        return E.with_args(node, args)
    return M.function(node.op, *args) if args else node


def canonical(node: Expr) -> Expr:
    """An expression of the score language in canonical form."""
    spelled: dict[str, Callable[..., Expr]] = {"sub": M.sub, "neg": M.neg, "div": M.div, "ne": M.ne}
    spelled |= {"ge": lambda a, b: M.le(b, a), "gt": lambda a, b: M.lt(b, a)}
    spelled |= {"rsqrt": lambda x: M.recip(M.function("sqrt", x))}
    return E.rebuild(node, lambda n, args: spelled[n.op](*args) if n.op in spelled else construct(n, args))


def raw(name: str, *args: Expr) -> Expr:
    """An operation that is computed as written: no algebra simplifies it."""
    return E.make("raw", args, name, "float")


def canonical_binders(node: Expr) -> Expr:
    """`node` with its bound variables renamed by depth, so that two expressions that differ only
    in the names of bound variables become the same object."""
    done: dict[tuple[Expr, int, frozenset[tuple[Expr, Expr]]], Expr] = {}

    def rename(current: Expr, depth: int, names: Mapping[Expr, Expr]) -> Expr:
        if current.op == "var":
            return names.get(current, current)
        if not current.args:
            return current
        key = (current, depth, frozenset((v, names[v]) for v in current.free if v in names))
        if key not in done:
            if current.op in E.BINDERS:
                variable, body = current.args
                bound = E.var(f"_{depth}", variable.args[0])
                args = (bound, rename(body, depth + 1, {**names, variable: bound}))
                done[key] = E.make(current.op, args, None, current.kind)
            else:
                done[key] = _renamed(current, tuple(rename(a, depth, names) for a in current.args))
        return done[key]

    return rename(node, 0, {})


def _renamed(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` with arguments that differ in names alone. Factors that did not cancel before do not cancel
    now, and checking again would double the cost for every level of nested sums."""
    if node.op != "mul" or node.kind == "int" or args == node.args:
        return construct(node, args)
    first = args[:1] if E.is_const(args[0]) else ()
    rest = sorted(args[len(first) :], key=lambda t: t.serial)
    return E.make("mul", (*first, *rest), None, node.kind)


def substitute(node: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """`node` with each key replaced by its value, in canonical form. Nothing is replaced in the extents of
    variables."""

    return E.rebuild(node, lambda n, args: mapping[n] if n in mapping else construct(n, args))
