"""Algebra on expressions: constructors that return a canonical form.

Element rules build meanings only through these functions, so two spellings of one thing tend to
arrive at the same object, and the recogniser compares with `is`. What is known here: linear
combinations, floor division and remainder of index expressions with ranges (`meaning/ranges.py`),
comparisons, boolean algebra, selections (`where`), and exponentials with logarithms.

Every rule is an identity over the real numbers with -inf as the logarithm of zero. Canonical
operations: `add` and `mul` are n-ary, subtraction and division are spelled with a factor -1 and
`recip`, integer comparisons are `le`/`eq` with positive terms on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from attngraph.ir import expr as E
from attngraph.ir.expr import Expr
from attngraph.meaning import ranges
from attngraph.meaning.ranges import Polynomial


def number(node: Expr) -> Expr:
    """A boolean as 0 or 1; anything else as it is."""
    return where(node, E.ONE, E.ZERO) if node.kind == "bool" else node


def _kind(args: tuple[Expr, ...]) -> str:
    kinds = {a.kind for a in args}
    return "int" if kinds <= {"int"} else "any" if "any" in kinds else "float"


# --- sums and products -----------------------------------------------------------------------


def add(*terms: Expr) -> Expr:
    """The sum. Like terms are combined; selections on one condition are merged; minus infinity
    in a branch of a selection absorbs what is added to it."""
    constant: float = 0
    is_float = False
    parts: dict[Expr, float] = {}
    stack = [number(t) for t in reversed(terms)]
    while stack:
        term = stack.pop()
        if term.op == "add":
            stack.extend(reversed(term.args))
        elif term.op == "const" and term is not E.NAN:
            constant += term.value
            is_float |= term.kind == "float"
        else:
            factor, rest = coefficient(term)
            parts[rest] = parts.get(rest, 0) + factor
            is_float |= term.kind != "int"
    kept = [scale(c, rest) for rest, c in parts.items() if c != 0]
    kept = _merge_selections(kept)
    if constant != 0 and any(t.op == "where" for t in kept):
        # A selection swallows the constant only when it stands alone: c + where(p, x, -inf).
        kept, constant = _absorb_constant(kept, constant)
    if constant != 0 or not kept:
        kept.append(E.const(constant))
    if len(kept) == 1:
        return kept[0]
    absorbed = _absorb_minus_infinity(kept)
    if absorbed is not None:
        return absorbed
    kept.sort(key=lambda t: t.serial)
    return E.make("add", tuple(kept), None, _kind(tuple(kept)) if is_float else "int")


def _absorb_constant(terms: list[Expr], constant: float) -> tuple[list[Expr], float]:
    if len(terms) == 1 and all(a.op == "const" for a in terms[0].args[1:]):
        condition, a, b = terms[0].args
        c = E.const(constant)
        return [where(condition, add(a, c), add(b, c))], 0
    return terms, constant


def _merge_selections(terms: list[Expr]) -> list[Expr]:
    """where(c, x, y) + where(c, u, v) is where(c, x + u, y + v); also for the negated condition."""
    merged: list[Expr] = []
    for term in terms:
        if term.op == "where":
            condition, x, y = term.args
            for place, other in enumerate(merged):
                if other.op != "where":
                    continue
                same, u, v = other.args
                if same is not_(condition):
                    same, u, v = condition, v, u
                if same is condition:
                    merged[place] = where(condition, add(x, u), add(y, v))
                    break
            else:
                merged.append(term)
        else:
            merged.append(term)
    return merged


def _absorb_minus_infinity(terms: list[Expr]) -> Expr | None:
    for place, term in enumerate(terms):
        if term.op == "where" and E.NEG_INF in term.args[1:]:
            rest = add(*terms[:place], *terms[place + 1 :])
            condition, x, y = term.args
            return where(
                condition,
                x if x is E.NEG_INF else add(x, rest),
                y if y is E.NEG_INF else add(y, rest),
            )
    return None


def coefficient(term: Expr) -> tuple[float, Expr]:
    """`term` as a number times the rest."""
    if term.op == "mul" and term.args[0].op == "const" and term.args[0] is not E.NAN:
        rest = term.args[1:]
        return term.args[0].value, rest[0] if len(rest) == 1 else E.make("mul", rest, None, _kind(rest))
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
        rest.append(exponents[0] if len(exponents) == 1 else exp(add(*(e.args[0] for e in exponents))))
    if E.NAN in rest:
        return E.NAN
    if constant == 0:
        return E.ZERO if all(r.kind == "int" for r in rest) else E.const(0.0)
    rest = _cancel(rest)
    if not rest:
        return E.const(constant)
    selected = _distribute_selection(constant, rest)
    if selected is not None:
        return selected
    if len(rest) == 1 and rest[0].op == "add":
        return add(*(mul(E.const(constant), t) for t in rest[0].args)) if constant != 1 else rest[0]
    if all(r.kind == "int" for r in rest) and any(r.op == "add" for r in rest):
        return _multiply_out(constant, rest)
    if constant == 1 and len(rest) == 1:
        return rest[0]
    rest.sort(key=lambda t: t.serial)
    args = tuple(rest) if constant == 1 else (E.const(constant), *rest)
    return E.make("mul", args, None, _kind(args))


def _cancel(factors: list[Expr]) -> list[Expr]:
    """Drop pairs x, recip(x)."""
    kept: list[Expr] = []
    for factor in factors:
        inverse = factor.args[0] if factor.op == "recip" else E.make("recip", (factor,))
        if inverse in kept:
            kept.remove(inverse)
        else:
            kept.append(factor)
    return kept


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
            return where(condition, mul(n, x), mul(n, y))
        if x.op == "const" and y.op == "const":
            others = (E.const(constant), *rest[:place], *rest[place + 1 :])
            return where(condition, mul(*others, x), mul(*others, y))
    return None


def _multiply_out(constant: float, factors: list[Expr]) -> Expr:
    product: Polynomial = {(): int(constant)}
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
        return exp(neg(node.args[0]))
    return E.make("recip", (node,), None, "float")


def div(a: Expr, b: Expr) -> Expr:
    return mul(a, recip(b))


# --- floor division and remainder --------------------------------------------------------------


def floordiv(a: Expr, b: Expr) -> Expr:
    """a // b for b >= 1; other divisors stay as they are."""
    return _divide(number(a), number(b))[0]


def mod(a: Expr, b: Expr) -> Expr:
    """a % b for b >= 1; other divisors stay as they are."""
    return _divide(number(a), number(b))[1]


def _divide(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    opaque = (E.make("floordiv", (a, b), None, _kind((a, b))), E.make("mod", (a, b), None, _kind((a, b))))
    if a.kind != "int" or b.kind != "int":
        return opaque
    if a.op == "const" and b.op == "const" and b.value != 0:
        return E.const(a.value // b.value), E.const(a.value % b.value)
    divisor = ranges.polynomial(b)
    if len(divisor) != 1 or not ranges.is_positive(divisor):
        return opaque
    multiples, rest = ranges.split_multiples(ranges.polynomial(a), divisor)
    quotient, remainder = from_polynomial(multiples), from_polynomial(rest)
    low, high = ranges.bounds(rest)
    if low is not None and high is not None:
        fits = ranges.subtract(ranges.subtract(divisor, {(): 1}), high)
        if ranges.is_nonnegative(low) and ranges.is_nonnegative(fits):
            return quotient, remainder
    inner = _divide_digits(rest, b) or (
        _nested_floordiv(remainder, b),
        E.make("mod", (remainder, b), None, "int"),
    )
    return add(quotient, inner[0]), inner[1]


def _nested_floordiv(a: Expr, b: Expr) -> Expr:
    if a.op == "floordiv" and ranges.is_positive(ranges.polynomial(a.args[1])):
        return floordiv(a.args[0], mul(a.args[1], b))
    return E.make("floordiv", (a, b), None, "int")


def _divide_digits(a: Polynomial, b: Expr) -> tuple[Expr, Expr] | None:
    """(g*x + r) divided by g*m, where 0 <= r < g: quotient x // m, remainder g*(x % m) + r."""
    if b.op != "const":
        return None
    for g in sorted({abs(c) for c in a.values()}, reverse=True):
        if g in (0, 1) or g >= b.value or b.value % g:
            continue
        high, low = ranges.split_multiples(a, {(): g})
        lower, upper = ranges.bounds(low)
        if lower is None or upper is None or not ranges.is_nonnegative(lower):
            continue
        if ranges.is_nonnegative(ranges.subtract({(): g - 1}, upper)):
            digit, m = from_polynomial(high), E.const(b.value // g)
            return floordiv(digit, m), add(mul(E.const(g), mod(digit, m)), from_polynomial(low))
    return None


# --- comparisons and booleans ------------------------------------------------------------------


def le(a: Expr, b: Expr) -> Expr:
    a, b = number(a), number(b)
    if (selected := _compare_selection(le, a, b)) is not None:
        return selected
    if a.kind == "int" and b.kind == "int":
        return _at_most_zero(ranges.subtract(ranges.polynomial(a), ranges.polynomial(b)))
    return _compare("le", a, b)


def lt(a: Expr, b: Expr) -> Expr:
    a, b = number(a), number(b)
    if (selected := _compare_selection(lt, a, b)) is not None:
        return selected
    if a.kind == "int" and b.kind == "int":
        return le(add(a, E.ONE), b)
    return _compare("lt", a, b)


def eq(a: Expr, b: Expr) -> Expr:
    for x, y in ((a, b), (b, a)):
        if x.kind == "bool" and y.op == "const":
            return x if y.value == 1 else not_(x) if y.value == 0 else E.FALSE
    a, b = number(a), number(b)
    if (selected := _compare_selection(eq, a, b)) is not None:
        return selected
    if a.kind == "int" and b.kind == "int":
        difference = ranges.subtract(ranges.polynomial(a), ranges.polynomial(b))
        low, high = ranges.bounds(difference)
        if not difference or (low == {} and high == {}):
            return E.TRUE
        if (low is not None and ranges.is_positive(low)) or (
            high is not None and ranges.is_positive(ranges.subtract({}, high))
        ):
            return E.FALSE
        branches = _selected_atom(difference)
        if branches is not None:
            condition, yes, no = branches
            return where(condition, eq(from_polynomial(yes), E.ZERO), eq(from_polynomial(no), E.ZERO))
        left, right = _sides(difference)
        if left.serial > right.serial:
            left, right = right, left
        return E.make("eq", (left, right), None, "bool")
    if a.serial > b.serial:
        a, b = b, a
    return _compare("eq", a, b)


_FOLD: dict[str, Callable[[float, float], bool]] = {
    "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
}


def _compare(op: str, a: Expr, b: Expr) -> Expr:
    if a.op == "const" and b.op == "const" and E.NAN not in (a, b):
        return E.const(_FOLD[op](a.value, b.value))
    return E.make(op, (a, b), None, "bool")


def _compare_selection(compare: Callable[[Expr, Expr], Expr], a: Expr, b: Expr) -> Expr | None:
    """A comparison of a selection (with a number in it) and a number goes into the selection."""
    if a.op == "where" and b.op == "const" and any(x.op == "const" for x in a.args[1:]):
        return where(a.args[0], compare(a.args[1], b), compare(a.args[2], b))
    if b.op == "where" and a.op == "const" and any(x.op == "const" for x in b.args[1:]):
        return where(b.args[0], compare(a, b.args[1]), compare(a, b.args[2]))
    return None


def _at_most_zero(terms: Polynomial) -> Expr:
    """terms <= 0, decided where ranges decide it, |x| resolved into two comparisons."""
    low, high = ranges.bounds(terms)
    if high is not None and ranges.is_nonnegative(ranges.subtract({}, high)):
        return E.TRUE
    if low is not None and ranges.is_positive(low):
        return E.FALSE
    if low is not None and ranges.is_nonnegative(low):
        return eq(from_polynomial(terms), E.ZERO)  # what is never negative is at most zero when zero
    if high is not None and high == {(): 1}:
        return not_(eq(from_polynomial(ranges.subtract({(): 1}, terms)), E.ZERO))
    branches = _selected_atom(terms)
    if branches is not None:
        condition, yes, no = branches
        return where(condition, _at_most_zero(yes), _at_most_zero(no))
    for atoms, factor in terms.items():
        if len(atoms) == 1 and atoms[0].op == "abs":
            rest = {a: c for a, c in terms.items() if a != atoms}
            inner = ranges.polynomial(atoms[0].args[0])
            both = [
                _at_most_zero(ranges.add(rest, ranges.multiply({(): sign * factor}, inner)))
                for sign in (1, -1)
            ]
            return and_(*both) if factor > 0 else or_(*both)
    terms = ranges.tighten(terms)
    left, right = _sides(terms)
    return E.make("le", (left, right), None, "bool")


def _selected_atom(terms: Polynomial) -> tuple[Expr, Polynomial, Polynomial] | None:
    """A selection among the terms: its condition, and the terms with either branch in its place."""
    for atoms, factor in terms.items():
        if len(atoms) == 1 and atoms[0].op == "where":
            rest = {a: c for a, c in terms.items() if a != atoms}
            condition, *branches = atoms[0].args
            yes, no = (
                ranges.add(rest, ranges.multiply({(): factor}, ranges.polynomial(b))) for b in branches
            )
            return condition, yes, no
    return None


def _sides(terms: Polynomial) -> tuple[Expr, Expr]:
    """terms (<= or ==) 0 as left, right with positive coefficients on both sides."""
    left = from_polynomial({a: c for a, c in terms.items() if c > 0})
    right = from_polynomial({a: -c for a, c in terms.items() if c < 0})
    return left, right


def not_(node: Expr) -> Expr:
    match node.op:
        case "const":
            return E.const(not node.value)
        case "not":
            return node.args[0]
        case "and":
            return or_(*(not_(a) for a in node.args))
        case "or":
            return and_(*(not_(a) for a in node.args))
        case "le" if all(a.kind == "int" for a in node.args):
            return le(add(node.args[1], E.ONE), node.args[0])
        case "where" if node.kind == "bool":
            return where(node.args[0], not_(node.args[1]), not_(node.args[2]))
    if node.kind != "bool" and node.op != "read":
        return eq(node, E.ZERO)
    return E.make("not", (node,), None, "bool")


def and_(*args: Expr) -> Expr:
    return _junction("and", E.TRUE, E.FALSE, args)


def or_(*args: Expr) -> Expr:
    return _junction("or", E.FALSE, E.TRUE, args)


def _junction(op: str, unit: Expr, zero: Expr, args: tuple[Expr, ...]) -> Expr:
    kept: dict[Expr, None] = {}
    stack = list(reversed(args))
    while stack:
        arg = stack.pop()
        if arg.op == op:
            stack.extend(reversed(arg.args))
        elif arg is zero or not_(arg) in kept:
            return zero
        elif arg is not unit:
            kept[arg] = None
    if len(kept) <= 1:
        return next(iter(kept), unit)
    return E.make(op, tuple(sorted(kept, key=lambda a: a.serial)), None, "bool")


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    if condition.kind != "bool":
        condition = ne(condition, E.ZERO)
    if condition.op == "const":
        return a if condition.value else b
    if a.op == "where" and a.args[0] is condition:
        a = a.args[1]
    if b.op == "where" and b.args[0] is condition:
        b = b.args[2]
    if a is b or (E.is_const(a) and E.is_const(b, a.value)):
        return a
    if a.kind == "bool" and b.kind == "bool":
        a = E.TRUE if a is condition else E.FALSE if a is not_(condition) else a
        b = E.FALSE if b is condition else E.TRUE if b is not_(condition) else b
        return or_(and_(condition, a), and_(not_(condition), b))
    if condition.op == "not":
        return where(condition.args[0], b, a)
    if a.op == "exp" and E.is_const(b, 0):
        return exp(where(condition, a.args[0], E.NEG_INF))
    if b.op == "exp" and E.is_const(a, 0):
        return exp(where(condition, E.NEG_INF, b.args[0]))
    if a.op == "where" and a.args[2] is b:
        return where(and_(condition, a.args[0]), a.args[1], b)
    if b.op == "where" and b.args[1] is a:
        return where(or_(condition, b.args[0]), a, b.args[2])
    return E.make("where", (condition, a, b), None, _kind((a, b)))


def ne(a: Expr, b: Expr) -> Expr:
    return not_(eq(a, b))


# --- functions ---------------------------------------------------------------------------------


def exp(node: Expr) -> Expr:
    """e ** node; exp(a - log z) is exp(a) / z."""
    node = number(node)
    if node.op == "const" and node is not E.NAN:
        return E.const(math.exp(node.value)) if node.value < 709 else E.INF
    factors: list[Expr] = []
    exponent: list[Expr] = []
    for term in node.args if node.op == "add" else (node,):
        factor, rest = coefficient(term)
        if rest.op == "log" and factor in (1, -1):
            factors.append(rest.args[0] if factor == 1 else recip(rest.args[0]))
        else:
            exponent.append(term)
    if factors:
        return mul(exp(add(*exponent)), *factors)
    return E.make("exp", (node,), None, "float")


def log(node: Expr) -> Expr:
    if node.op == "exp":
        return node.args[0]
    return function("log", node)


def power(base: Expr, exponent: Expr) -> Expr:
    base, exponent = number(base), number(exponent)
    if exponent.op == "const":
        if exponent.value in (1, -1):
            return base if exponent.value == 1 else recip(base)
        if exponent.value == 2:
            return mul(base, base)
        if exponent.value in (0.5, -0.5):
            root = function("sqrt", base)
            return root if exponent.value == 0.5 else recip(root)
    if base.op == "const" and exponent.op == "const":
        try:
            value = base.value**exponent.value
            return E.NAN if isinstance(value, complex) else E.const(value)
        except (OverflowError, ZeroDivisionError, TypeError):
            pass
    return E.make("pow", (base, exponent), None, "float")


def absolute(node: Expr) -> Expr:
    node = number(node)
    if node.kind == "int":
        low, high = ranges.bounds(ranges.polynomial(node))
        if low is not None and ranges.is_nonnegative(low):
            return node
        if high is not None and ranges.is_nonnegative(ranges.subtract({}, high)):
            return neg(node)
    return function("abs", node)


_PYTHON: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "tanh": math.tanh, "sin": math.sin, "cos": math.cos, "abs": abs,
    "log": math.log, "log2": math.log2, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
}  # fmt: skip


def function(name: str, *args: Expr) -> Expr:
    """A pointwise function that has no algebra of its own: constants are folded, and it goes into
    a selection between two constants."""
    args = tuple(number(a) for a in args)
    if len(args) == 1:
        (x,) = args
        if x.op == "const" and x is not E.NAN and name in _PYTHON and not math.isinf(x.value):
            try:
                return E.const(_PYTHON[name](x.value))
            except (ValueError, OverflowError):
                pass
        if x.op == "where" and all(a.op == "const" for a in x.args[1:]):
            return where(x.args[0], *(function(name, a) for a in x.args[1:]))
        if name in ("floor", "ceil", "trunc", "round", "int") and x.kind == "int":
            return x
    if name == "isnan":
        return E.make("isnan", args, None, "bool")
    kind = (
        "int"
        if name == "int" or (name in ("abs", "sign", "min", "max") and _kind(args) == "int")
        else "float"
    )
    if name in ("min", "max") and all(a.op == "const" and a is not E.NAN for a in args):
        return E.const((min if name == "min" else max)(a.value for a in args))
    return E.make(name, args, None, kind)


def total(variable: Expr, body: Expr) -> Expr:
    """The sum of `body` over the variable's extent."""
    if variable not in body.free:
        return mul(variable.args[0], body)
    return E.make("sum", (variable, body), None, "int" if body.kind == "int" else "float")


# --- rebuilding --------------------------------------------------------------------------------

_CONSTRUCT: dict[str, Callable[..., Expr]] = {
    "add": add, "mul": mul, "recip": recip, "floordiv": floordiv, "mod": mod, "le": le, "lt": lt,
    "eq": eq, "not": not_, "and": and_, "or": or_, "where": where, "exp": exp, "log": log,
    "pow": power, "abs": absolute, "sum": total,
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
    return function(node.op, *args) if args else node


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
