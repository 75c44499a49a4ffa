"""Exponentials with logarithms, powers, and pointwise functions that have no algebra of their own."""

import math
from collections.abc import Callable

from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M


def exp(node: Expr) -> Expr:
    """e ** node; exp(a - log z) is exp(a) / z."""
    node = M.number(node)
    if node.op == "const" and node is not E.NAN:
        return E.const(math.exp(node.value)) if node.value < 709 else E.INF
    factors: list[Expr] = []
    exponent: list[Expr] = []
    for term in E.parts(node, "add"):
        factor, rest = M.coefficient(term)
        if rest.op == "log" and factor in (1, -1):
            factors.append(rest.args[0] if factor == 1 else M.recip(rest.args[0]))
        else:
            exponent.append(term)
    if factors:
        return M.mul(exp(M.add(*exponent)), *factors)
    return E.make("exp", (node,), None, "float")


def log(node: Expr) -> Expr:
    if node.op == "exp":
        return node.args[0]
    return function("log", node)


def power(base: Expr, exponent: Expr) -> Expr:
    base, exponent = M.number(base), M.number(exponent)
    if exponent.op == "const":
        if exponent.value in (1, -1):
            return base if exponent.value == 1 else M.recip(base)
        if exponent.value == 2:
            return M.mul(base, base)
        if exponent.value in (0.5, -0.5):
            root = function("sqrt", base)
            return root if exponent.value == 0.5 else M.recip(root)
    grows = base.op == "const" and base is not E.NAN and 0 < base.value < math.inf
    if grows and exponent.op != "const" and exponent.kind == "float":
        return exp(M.mul(E.const(math.log(base.value)), exponent))
    if base.op == "const" and exponent.op == "const":
        try:
            value = base.value**exponent.value
            return E.NAN if isinstance(value, complex) else E.const(value)
        except (OverflowError, ZeroDivisionError, TypeError):
            pass
    return E.make("pow", (base, exponent), None, "float")


def absolute(node: Expr) -> Expr:
    node = M.number(node)
    if _is_never_negative(node, {}):
        return node
    if node.kind == "int":
        terms = ranges.polynomial(node)
        if ranges.is_never_negative(terms):
            return node
        if ranges.is_never_negative(ranges.subtract({}, terms)):
            return M.neg(node)
    return function("abs", node)


def _is_never_negative(node: Expr, known: dict[Expr, bool]) -> bool:
    """Whether a real number is zero or more by the form of its formula: a weight of a softmax, say. What is
    `known` is not asked again, because formulas share their parts."""
    if node not in known:
        known[node] = _has_no_negative_part(node, known)
    return known[node]


def _has_no_negative_part(node: Expr, known: dict[Expr, bool]) -> bool:
    match node.op:
        case "exp" | "sigmoid" | "sqrt" | "abs":
            return True
        case "const":
            return node is not E.NAN and bool(node.value >= 0)
        case "sum" | "where":
            return all(_is_never_negative(a, known) for a in node.args[1:])
        case "add" | "mul" | "recip":
            return all(_is_never_negative(a, known) for a in node.args)
    return False


_PYTHON: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "tanh": math.tanh, "sin": math.sin, "cos": math.cos, "abs": abs,
    "log": math.log, "log2": math.log2, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
}  # fmt: skip


def _of_number(name: str, value: float) -> Expr | None:
    """A function of a number: minus infinity for the logarithm of zero, NaN where it is undefined."""
    if name not in _PYTHON or (math.isinf(value) and name != "abs"):
        return None
    if name in ("log", "log2") and value == 0:
        return E.NEG_INF
    try:
        return E.const(_PYTHON[name](value))
    except ValueError:
        return E.NAN
    except OverflowError:
        return None


def function(name: str, *args: Expr) -> Expr:
    """A pointwise function that has no algebra of its own: constants are folded, and it is applied to
    both branches of a selection between two constants."""
    args = tuple(M.number(a) for a in args)
    if len(args) == 1:
        (x,) = args
        if name == "isnan" and (x.op == "const" or x.kind == "int"):
            return E.const(x is E.NAN)
        found = _of_number(name, x.value) if x.op == "const" and x is not E.NAN else None
        if found is not None:
            return found
        if x.op == "where" and all(a.op == "const" for a in x.args[1:]):
            return M.where(x.args[0], *(function(name, a) for a in x.args[1:]))
        if name in ("floor", "ceil", "trunc", "round", "int") and x.kind == "int":
            return x
    if name == "isnan":
        return E.make("isnan", args, None, "bool")
    is_whole = name in ("abs", "sign", "min", "max") and M.kind_of(args) == "int"
    kind = "int" if is_whole or name == "int" else "float"
    if name in ("min", "max") and all(a.op == "const" and a is not E.NAN for a in args):
        return E.const((min if name == "min" else max)(a.value for a in args))
    if name in ("min", "max") and all(_is_choice(a) for a in args):
        place = next(i for i, a in enumerate(args) if a.op == "where")
        condition, *branches = args[place].args
        return M.where(condition, *(function(name, *args[:place], b, *args[place + 1 :]) for b in branches))
    if name in ("min", "max") and kind == "int":
        for lesser, greater in (args, args[::-1]):
            difference = ranges.subtract(ranges.polynomial(greater), ranges.polynomial(lesser))
            if ranges.is_never_negative(difference):
                return greater if name == "max" else lesser
    return E.make(name, args, None, kind)


def _is_choice(node: Expr) -> bool:
    """Whether it is a constant or a selection between two constants, none of them NaN."""
    numbers = node.args[1:] if node.op == "where" else (node,)
    return all(n.op == "const" and n is not E.NAN for n in numbers)


def narrow(node: Expr, limit: float) -> Expr:
    """A number converted to a type whose largest value is `limit`: constants beyond it become infinite."""
    if node.op == "where":
        return M.where(node.args[0], narrow(node.args[1], limit), narrow(node.args[2], limit))
    if node.op == "add":
        return M.add(*(narrow(t, limit) for t in node.args))
    if node.op == "const" and node is not E.NAN and limit < abs(node.value) < math.inf:
        return E.INF if node.value > 0 else E.NEG_INF
    return node
