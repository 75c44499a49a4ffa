"""Sums and products in canonical form: like terms joined, numbers in front, selections merged."""

import math

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.ranges import Polynomial


def number(node: Expr) -> Expr:
    """A boolean as 0 or 1; anything else unchanged."""
    return M.where(node, E.ONE, E.ZERO) if node.kind == "bool" else node


def kind_of(args: tuple[Expr, ...]) -> str:
    """The kind of a result computed from numbers of these kinds."""
    kinds = {a.kind for a in args}
    return "int" if kinds <= {"int"} else "any" if "any" in kinds else "float"


def add(*terms: Expr) -> Expr:
    """The sum. Like terms are combined; selections on one condition are merged."""
    constant: float = 0
    is_float = False
    parts: dict[Expr, float] = {}
    stack = [number(t) for t in reversed(terms)]
    while stack:
        term = stack.pop()
        if term.op == "add":
            stack.extend(reversed(term.args))
        elif term is E.NAN:
            return E.NAN
        elif term.op == "const":
            constant += term.value
            is_float |= term.kind == "float"
        else:
            factor, rest = coefficient(term)
            parts[rest] = parts.get(rest, 0) + factor
            is_float |= term.kind != "int"
    _rejoin_digits(parts)
    kept = [scale(c, rest) for rest, c in parts.items() if c != 0]
    kept = _merge_selections(kept)
    if constant != 0 and any(t.op == "where" for t in kept):
        # The constant moves into selections of constants if these are the only other term.
        kept, constant = _absorb_constant(kept, constant)
    if constant != 0 or not kept:
        kept.append(E.const(constant))
    if len(kept) == 1:
        return kept[0]
    kept.sort(key=lambda t: t.order)
    return E.make("add", tuple(kept), None, kind_of(tuple(kept)) if is_float else "int")


def _rejoin_digits(parts: dict[Expr, float]) -> None:
    """n * (c * (x // c) + x % c) is n * x; in place."""
    for rest in [r for r in parts if r.op == "mod" and r.kind == "int" and r.args[1].op == "const"]:
        whole, divisor = rest.args
        quotient = M.floordiv(whole, divisor)
        factor = parts[rest]
        if factor != 0 and quotient.op == "floordiv" and parts.get(quotient) == factor * divisor.value:
            del parts[rest], parts[quotient]
            n, atom = coefficient(whole)
            if atom.op in ("var", "floordiv", "mod"):
                parts[atom] = parts.get(atom, 0) + factor * n
            else:
                parts[quotient], parts[rest] = factor * divisor.value, factor


def _absorb_constant(terms: list[Expr], constant: float) -> tuple[list[Expr], float]:
    if len(terms) == 1 and _chooses_numbers(terms[0]):
        condition, a, b = terms[0].args
        c = E.const(constant)
        return [M.where(condition, add(a, c), add(b, c))], 0
    return terms, constant


def _chooses_numbers(selection: Expr) -> bool:
    return all(a.op == "const" or (a.op == "where" and _chooses_numbers(a)) for a in selection.args[1:])


def _merge_selections(terms: list[Expr]) -> list[Expr]:
    """where(c, x, y) + where(c, u, v) is where(c, x + u, y + v), also for the negated condition; and where
    c and d never hold at once, where(c, x, y) + where(d, u, 0) is where(c, x, y + where(d, u, 0))."""
    merged: list[Expr] = []
    for term in terms:
        if term.op == "where":
            for place, other in enumerate(merged):
                if other.op == "where" and (joined := _joined_selection(other, term)) is not None:
                    merged[place] = joined
                    break
            else:
                merged.append(term)
        else:
            merged.append(term)
    return merged


def _joined_selection(a: Expr, b: Expr) -> Expr | None:
    """The sum of two selections as one selection, or None where their conditions have nothing in common."""
    condition, x, y = b.args
    same, u, v = a.args
    if same is M.not_(condition):
        same, u, v = condition, v, u
    if same is condition:
        return M.where(condition, add(x, u), add(y, v))
    for outer, inner in sorted(((a, b), (b, a)), key=lambda pair: pair[0].args[0].order):
        if E.is_const(inner.args[2], 0) and M.exclude_each_other(outer.args[0], inner.args[0]):
            condition, x, y = outer.args
            return M.where(condition, x, add(y, inner))
    return None


def coefficient(term: Expr) -> tuple[float, Expr]:
    """`term` as a number times the rest."""
    if term.op == "mul" and term.args[0].op == "const" and term.args[0] is not E.NAN:
        rest = term.args[1:]
        return term.args[0].value, rest[0] if len(rest) == 1 else E.make("mul", rest, None, kind_of(rest))
    return 1, term


def scale(factor: float, node: Expr) -> Expr:
    return node if factor == 1 and not isinstance(factor, bool) else mul(E.const(factor), node)


def neg(node: Expr) -> Expr:
    return mul(E.const(-1), node)


def sub(a: Expr, b: Expr) -> Expr:
    return add(a, neg(b))


def mul(*factors: Expr) -> Expr:
    """The product. Numbers are gathered in front and distributed over sums and selections; for
    integers sums are multiplied out; exponentials are merged."""
    constant: float = 1
    rest: list[Expr] = []
    exponents: list[Expr] = []
    stack = [number(f) for f in reversed(factors)]
    while stack:
        factor = stack.pop()
        if factor.op == "mul":
            stack.extend(reversed(factor.args))
        elif factor.op == "const" and factor is not E.NAN:
            constant *= factor.value
        elif factor.op == "exp":
            exponents.append(factor)
        else:
            rest.append(factor)
    if exponents:
        rest.append(exponents[0] if len(exponents) == 1 else M.exp(add(*(e.args[0] for e in exponents))))
    if E.NAN in rest:
        return E.NAN
    if constant == 0:
        if all(r.kind == "int" for r in rest):
            return E.ZERO
        return M.where(M.or_(*(_is_infinite(r) for r in rest)), E.NAN, E.const(0.0))
    rest = _cancel(rest)
    if not rest:
        return E.const(constant)
    selected = _distribute_selection(constant, rest)
    if selected is not None:
        return selected
    one_sum = len(rest) == 1 and rest[0].op == "add"
    if one_sum and math.isfinite(constant) and not _drowns(constant, rest[0]):
        return add(*(mul(E.const(constant), t) for t in rest[0].args)) if constant != 1 else rest[0]
    # A mask of integers stays zero where it is zero; a formula of indices is always multiplied out.
    is_mask = one_sum and any(n.op == "read" for n in E.walk(rest[0]))
    is_whole = all(r.kind == "int" for r in rest) and any(r.op == "add" for r in rest)
    if isinstance(constant, int) and is_whole and not is_mask:
        return _multiply_out(constant, rest)
    if constant == 1 and len(rest) == 1:
        return rest[0]
    rest.sort(key=lambda t: t.order)
    args = tuple(rest) if constant == 1 else (E.const(constant), *rest)
    return E.make("mul", args, None, kind_of(args))


def _is_infinite(node: Expr) -> Expr:
    """Where a masked value is infinite or NaN because of a constant in it (`-inf` at masked keys), so that
    zero times it is NaN. Values that are computed are taken to be finite."""
    if node.op == "const":
        return E.FALSE if node is not E.NAN and math.isfinite(node.value) else E.TRUE
    if node.op == "where":
        condition, a, b = node.args
        return M.where(condition, _is_infinite(a), _is_infinite(b))
    if node.op in ("add", "mul"):
        return M.or_(*(_is_infinite(a) for a in node.args))
    return E.FALSE


LARGEST_CONSTANT = 1000.0


def _drowns(constant: float, total: Expr) -> bool:
    """Whether multiplying a sum out would add a constant so large that the other terms lose their last
    digits: `(1 - mask) * -10000` is exactly zero where the mask is one."""
    numbers = (t.value for t in total.args if t.op == "const" and t is not E.NAN)
    return any(abs(constant * number) > LARGEST_CONSTANT for number in numbers)


def _cancel(factors: list[Expr]) -> list[Expr]:
    """Drop pairs x, recip(x); sums that differ only in the names of their variables are equal."""
    kept: dict[Expr, list[Expr]] = {}
    over = [f.args[0].op for f in factors if f.op == "recip"]
    # Renaming takes time in proportion to a sum's length.
    may_cancel = "sum" in over and any(f.op == "sum" for f in factors)
    for factor in factors:
        name = M.canonical_binders(factor) if may_cancel and _is_sum(factor) else factor
        inverse = name.args[0] if name.op == "recip" else E.make("recip", (name,))
        if kept.get(inverse):
            kept[inverse].pop()
        else:
            kept.setdefault(name, []).append(factor)
    return [f for same in kept.values() for f in same]


def _is_sum(factor: Expr) -> bool:
    return "sum" in (factor.op, factor.args[0].op if factor.op == "recip" else "")


def _distribute_selection(constant: float, rest: list[Expr]) -> Expr | None:
    """n * where(c, x, y), and x * where(c, number, number)."""
    for place, factor in enumerate(rest):
        if factor.op != "where":
            continue
        condition, x, y = factor.args
        if len(rest) == 1:
            if constant == 1:
                return None
            n = E.const(constant)
            return M.where(condition, mul(n, x), mul(n, y))
        if x.op == "const" and y.op == "const":
            others = (E.const(constant), *rest[:place], *rest[place + 1 :])
            return M.where(condition, mul(*others, x), mul(*others, y))
    return None


def _multiply_out(constant: int, factors: list[Expr]) -> Expr:
    product: Polynomial = {(): constant}
    for factor in factors:
        product = ranges.multiply(product, ranges.polynomial(factor))
    return from_polynomial(product)


def from_polynomial(terms: Polynomial) -> Expr:
    return add(*(mul(E.const(c), *atoms) for atoms, c in terms.items()))


def recip(node: Expr) -> Expr:
    node = number(node)
    if node.op == "const" and node.value not in (0, "nan"):
        return E.const(1.0 / node.value)
    if node.op == "recip":
        return node.args[0]
    if node.op == "mul":
        return mul(*(recip(a) for a in node.args))
    if node.op == "exp":
        return M.exp(neg(node.args[0]))
    return E.make("recip", (node,), None, "float")


def div(a: Expr, b: Expr) -> Expr:
    return mul(a, recip(b))
