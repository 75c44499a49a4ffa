"""Comparisons, booleans and selections: decided by ranges where possible, canonical otherwise."""

from collections.abc import Callable

from attngraph.ir import budgets
from attngraph.ir.language import E, Expr
from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.ranges import Polynomial
from attngraph.meaning.algebra.simplify.remembered import remembered


@remembered
def le(a: Expr, b: Expr) -> Expr:
    a, b = M.number(a), M.number(b)
    if (selected := _compare_selection(le, a, b)) is not None:
        return selected
    if a.kind == "int" and b.kind == "int":
        return _at_most_zero(ranges.subtract(ranges.polynomial(a), ranges.polynomial(b)))
    return _compare("le", a, b)


def lt(a: Expr, b: Expr) -> Expr:
    a, b = M.number(a), M.number(b)
    if (selected := _compare_selection(lt, a, b)) is not None:
        return selected
    if a.kind == "int" and b.kind == "int":
        return le(M.add(a, E.ONE), b)
    return _compare("lt", a, b)


@remembered
def eq(a: Expr, b: Expr) -> Expr:
    for x, y in ((a, b), (b, a)):
        if x.kind == "bool" and y.op == "const":
            return x if y.value == 1 else not_(x) if y.value == 0 else E.FALSE
    a, b = M.number(a), M.number(b)
    if (selected := _compare_selection(eq, a, b)) is not None:
        return selected
    if a.kind == "int" and b.kind == "int":
        difference = ranges.subtract(ranges.polynomial(a), ranges.polynomial(b))
        low, high = ranges.bounds(difference)
        if not difference or (low == {} and high == {}):
            return E.TRUE
        least = low, None if high is None else ranges.subtract({}, high)
        if any(x is not None and ranges.is_positive(x) for x in least):
            return E.FALSE
        branches = _selected_atom(difference)
        if branches is not None:
            condition, yes, no = branches
            return where(condition, eq(M.from_polynomial(yes), E.ZERO), eq(M.from_polynomial(no), E.ZERO))
        left, right = _sides(difference)
        if left.order > right.order:
            left, right = right, left
        return E.make("eq", (left, right), None, "bool")
    if a.order > b.order:
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
    """A comparison moved into a selection: of a selection with a constant branch and a number, or of two
    selections on the same condition. None for others, and where there are too many selections."""
    if _selects_much(a, b):
        return None
    if a.op == b.op == "where" and a.args[0] is b.args[0]:
        return where(a.args[0], compare(a.args[1], b.args[1]), compare(a.args[2], b.args[2]))
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
        return eq(M.from_polynomial(terms), E.ZERO)  # it is never negative
    if high is not None and high == {(): 1}:
        return not_(eq(M.from_polynomial(ranges.subtract({(): 1}, terms)), E.ZERO))
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
    """A selection among the terms: its condition, and the terms with either branch; None beside many."""
    if _selects_much(*(atoms[0] for atoms in terms if len(atoms) == 1)):
        return None
    for atoms, factor in terms.items():
        if len(atoms) == 1 and atoms[0].op == "where":
            rest = {a: c for a, c in terms.items() if a != atoms}
            condition, *branches = atoms[0].args
            scaled = (ranges.multiply({(): factor}, ranges.polynomial(b)) for b in branches)
            yes, no = (ranges.add(rest, terms) for terms in scaled)
            return condition, yes, no
    return None


def _selects_much(*nodes: Expr) -> bool:
    selections = (below for node in nodes if node.op == "where" for below in E.walk(node))
    return len({n for n in selections if n.op == "where"}) > budgets.SELECTIONS


def _sides(terms: Polynomial) -> tuple[Expr, Expr]:
    """terms (<= or ==) 0 as left, right with positive coefficients on both sides."""
    left = M.from_polynomial({a: c for a, c in terms.items() if c > 0})
    right = M.from_polynomial({a: -c for a, c in terms.items() if c < 0})
    return left, right


@remembered
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
            return le(M.add(node.args[1], E.ONE), node.args[0])
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
        # The negation of an "and" is an "or", and vice versa: `kept` has its parts, never itself.
        elif arg is zero or (arg.op not in ("and", "or") and not_(arg) in kept):
            return zero
        elif arg is not unit:
            kept[arg] = None
    for weaker in _implied(op, list(kept)):
        del kept[weaker]
    if len(kept) <= 1:
        return next(iter(kept), unit)
    joined = _joined(op, list(kept))
    if joined is not None:
        return _junction(op, unit, zero, joined)
    return E.make(op, tuple(sorted(kept, key=lambda a: a.order)), None, "bool")


def _joined(op: str, parts: list[Expr]) -> tuple[Expr, ...] | None:
    """(x and y) or (x and not y) is x, and the same with "and" and "or" exchanged: the parts with the first
    two of this form joined, or None where there are none, or many parts."""
    inner, make = ("and", and_) if op == "or" else ("or", or_)
    nested = [p for p in parts if p.op == inner]
    if not 1 < len(nested) <= budgets.COMPARISONS:
        return None
    for place, a in enumerate(nested):
        for b in nested[place + 1 :]:
            (mine, theirs) = ([x for x in one.args if x not in other.args] for one, other in ((a, b), (b, a)))
            if len(mine) == len(theirs) == 1 and not_(mine[0]) is theirs[0]:
                common = make(*(x for x in a.args if x in b.args))
                return (*(p for p in parts if p not in (a, b)), common)
    return None


def _implied(op: str, parts: list[Expr]) -> list[Expr]:
    """Comparisons of integers that another one in the junction makes superfluous."""
    limits = _limits(parts)
    superfluous: list[Expr] = []
    for part, terms in limits.items():
        others = [x for x in limits if x is not part and x not in superfluous]
        # terms <= 0 follows from larger <= 0.
        pairs = [(limits[x], terms) if op == "and" else (terms, limits[x]) for x in others]
        if any(ranges.is_never_negative(ranges.subtract(larger, smaller)) for larger, smaller in pairs):
            superfluous.append(part)
    return superfluous


def _limits(parts: list[Expr]) -> dict[Expr, Polynomial]:
    """For each comparison of integers what it says is at most zero; empty where there are too many."""
    found = [p for p in parts if p.op == "le" and all(a.kind == "int" for a in p.args)]
    if not 1 < len(found) <= budgets.COMPARISONS:
        return {}
    return {p: ranges.subtract(*(ranges.polynomial(a) for a in p.args)) for p in found}


def exclude_each_other(a: Expr, b: Expr) -> bool:
    """Whether two conditions never hold at once, as two comparisons of integers in them show."""
    for one, other in ((a, b), (b, a)):
        if one.op == "or":
            return all(exclude_each_other(part, other) for part in one.args)
    mine, theirs = _at_most_zero_in(a), _at_most_zero_in(b)
    if len(mine) + len(theirs) > budgets.COMPARISONS:
        return False
    # Of two numbers that are at most zero the sum is too.
    sums = (ranges.bounds(ranges.add(one, other))[0] for one in mine for other in theirs)
    return any(low is not None and ranges.is_positive(low) for low in sums)


def _at_most_zero_in(condition: Expr) -> list[Polynomial]:
    """What is at most zero where a conjunction of comparisons of integers holds."""
    found: list[Polynomial] = []
    for part in E.parts(condition, "and"):
        if part.op in ("le", "eq") and all(a.kind == "int" for a in part.args):
            difference = ranges.subtract(*(ranges.polynomial(a) for a in part.args))
            found.append(difference)
            if part.op == "eq":
                found.append(ranges.subtract({}, difference))
    return found


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
        return M.exp(where(condition, a.args[0], E.NEG_INF))
    if b.op == "exp" and E.is_const(a, 0):
        return M.exp(where(condition, E.NEG_INF, b.args[0]))
    if a.op == "where" and a.args[2] is b:
        return where(and_(condition, a.args[0]), a.args[1], b)
    if b.op == "where" and b.args[1] is a:
        return where(or_(condition, b.args[0]), a, b.args[2])
    return E.make("where", (condition, a, b), None, M.kind_of((a, b)))


def ne(a: Expr, b: Expr) -> Expr:
    return not_(eq(a, b))
