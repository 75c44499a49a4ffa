"""Expressions with bound variables, rebuilt through the canonical constructors: what is put in the place of a
variable, how bound ones are named, and sums, of which factors that do not vary are moved out, and which can
be cut into pieces.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

from attngraph.ir import budgets
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.ranges import is_at_most

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
    rest = sorted(args[len(first) :], key=lambda t: t.order)
    return E.make("mul", (*first, *rest), None, node.kind)


def substitute(node: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """`node` with each key replaced by its value, in canonical form. Nothing is replaced in the extents of
    variables."""

    return E.rebuild(node, lambda n, args: mapping[n] if n in mapping else construct(n, args))


def total(variable: Expr, body: Expr) -> Expr:
    """The sum of `body` over the variable's extent; what does not vary is moved out of it."""
    if variable not in body.free:
        return M.mul(variable.args[0], body)
    if body.op == "mul":
        fixed = [f for f in body.args if variable not in f.free]
        if fixed:
            return M.mul(*fixed, total(variable, M.mul(*(f for f in body.args if variable in f.free))))
    if body.op == "add" and body.kind == "float":
        fixed = [t for t in body.args if t.op == "const" and math.isfinite(t.value)]
        if fixed:
            rest = M.add(*(t for t in body.args if t not in fixed))
            return M.add(total(variable, rest), M.mul(variable.args[0], *fixed))
    return E.make("sum", (variable, body), None, "int" if body.kind == "int" else "float")


def totals(variables: Iterable[Expr], body: Expr) -> Expr:
    """The sum over several variables, the first one innermost."""
    for variable in variables:
        body = total(variable, body)
    return body


def pieces(variable: Expr, body: Expr, few: int = budgets.SUMMANDS, some: bool = False) -> list[Expr]:
    """The sum of `body` over the variable as terms that add up to it: the range is cut wherever a
    comparison of the variable with a size or a number changes its answer. In a piece of at most `few`
    elements, each element is a term of its own. `some`: as in `stretches`."""
    cut = stretches(variable, body, some)
    if cut is None:
        return [total(variable, body)]
    found = []
    for start, place in cut:
        length = place.args[0]
        if length.op == "const" and length.value <= few:
            found += [M.substitute(body, {variable: M.add(E.const(n), start)}) for n in range(length.value)]
        else:
            found.append(total(place, M.substitute(body, {variable: M.add(place, start)})))
    return found


def stretches(variable: Expr, body: Expr, some: bool = False) -> list[tuple[Expr, Expr]] | None:
    """The variable's range, cut wherever a comparison changes its answer: where each stretch starts, and a
    variable of its own. None where the order of the cuts cannot be shown; with `some`, only those
    that are sizes alone, as between parts that a `cat` puts together."""
    cuts = _thresholds(variable, body)
    if some:
        cuts = [place for place in cuts if () not in ranges.polynomial(place)]
    bounds = _ordered([E.ZERO, *cuts, variable.args[0]])
    return None if bounds is None else [
        (start, E.var(f"{variable.value}:{number}", M.sub(stop, start)))
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]  # fmt: skip


def _thresholds(variable: Expr, body: Expr) -> list[Expr]:
    """The places where a comparison with the variable alone changes its answer."""
    found: dict[Expr, None] = {}
    for node in E.walk(body):
        if node.op not in ("le", "eq") or node.args[0].kind != "int" or variable not in node.free:
            continue
        difference = ranges.subtract(ranges.polynomial(node.args[0]), ranges.polynomial(node.args[1]))
        factor = difference.pop((variable,), 0)
        rest = M.from_polynomial(difference)
        if factor not in (1, -1) or rest.free or any(a.op not in ("size", "const") for a in _leaves(rest)):
            continue
        place = M.neg(rest) if factor == 1 else rest
        if node.op == "eq":
            found.update({place: None, M.add(place, E.ONE): None})
        else:
            found[M.add(place, E.ONE) if factor == 1 else place] = None
    return list(found)


def _leaves(node: Expr) -> list[Expr]:
    return [n for n in E.walk(node) if not n.args]


def _ordered(places: list[Expr]) -> list[Expr] | None:
    """The places between the first and the last in ascending order; None where that cannot be shown."""
    first, last = places[0], places[-1]
    ordered: list[Expr] = [first]
    for place in places[1:]:
        if place in ordered or not is_at_most(place, last) or not is_at_most(first, place):
            if place in ordered or is_at_most(last, place) or is_at_most(place, first):
                continue  # beyond the range: no cut
            return None
        before = [p for p in ordered if is_at_most(p, place)]
        if any(not is_at_most(place, p) for p in ordered[len(before) :]) or before != ordered[: len(before)]:
            return None
        ordered.insert(len(before), place)
    return ordered
