"""The algebra of meanings: whatever the constructors of `simplify` make of an expression, it has the
value that was written down, at every point.

Random expressions are built twice, as plain trees that nothing simplifies and through the constructors.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra import M, ranges

BUILD: dict[str, Callable[..., Expr]] = {
    "add": M.add,
    "mul": M.mul,
    "sub": M.sub,
    "neg": M.neg,
    "floordiv": M.floordiv,
    "mod": M.mod,
    "le": M.le,
    "lt": M.lt,
    "eq": M.eq,
    "ne": M.ne,
    "where": M.where,
    "and": M.and_,
    "or": M.or_,
    "not": M.not_,
    "abs": M.absolute,
    "div": M.div,
    "recip": M.recip,
    "exp": M.exp,
    "log": M.log,
    "pow": M.power,
}
for _name in ("min", "max", "tanh", "sqrt", "sin", "floor", "sign"):
    BUILD[_name] = lambda *a, n=_name: M.function(n, *a)

BOOLEAN = {"le", "lt", "eq", "ne", "and", "or", "not"}
N0, N1 = E.size("n0"), E.size("n1")
I, J, K = E.var("i", E.const(3)), E.var("j", N0), E.var("k", E.const(6))
X, Y, Z = (E.read(name, (), "float") for name in "xyz")
FLAG = E.read("flag", (), "bool")
Tree = Expr | tuple[Any, ...]


def simplified(tree: Tree) -> Expr:
    return tree if isinstance(tree, Expr) else BUILD[tree[0]](*(simplified(t) for t in tree[1:]))


def plain(tree: Tree) -> Expr:
    """The same expression, with nothing simplified."""
    if isinstance(tree, Expr):
        return tree
    args = tuple(plain(t) for t in tree[1:])
    return E.make(tree[0], args, None, "bool" if tree[0] in BOOLEAN else "any")


def _node(op: str, *args: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.tuples(st.just(op), *args)


def integers(depth: int) -> st.SearchStrategy[Tree]:
    leaves: st.SearchStrategy[Tree] = st.one_of(
        st.sampled_from([I, J, K, I, J, K, N0, N1]), st.integers(-5, 12).map(E.const)
    )
    if depth == 0:
        return leaves
    inner, truth = integers(depth - 1), booleans(depth - 1)
    divisor: st.SearchStrategy[Tree] = st.one_of(
        st.sampled_from([2, 3, 4, 6, 12, -2, -3, 1]).map(E.const),
        st.sampled_from([N0, N1]),
        st.sampled_from([("mul", N0, E.const(2)), ("mul", N0, N1), ("add", N0, E.ONE), ("add", J, E.ONE)]),
    )
    return st.one_of(
        leaves,
        _node("add", inner, inner),
        _node("add", inner, inner, inner),
        _node("mul", inner, inner),
        _node("sub", inner, inner),
        _node("neg", inner),
        _node("floordiv", inner, divisor),
        _node("mod", inner, divisor),
        _node("floordiv", inner, divisor),
        _node("mod", inner, divisor),
        _node("where", truth, inner, inner),
        _node("abs", inner),
        _node(("min"), inner, inner),
        _node("max", inner, inner),
        _node("add", inner, truth),
        _node("mul", truth, inner),
        _node("sign", inner),
    )


def booleans(depth: int) -> st.SearchStrategy[Tree]:
    constants: st.SearchStrategy[Tree] = st.sampled_from([E.TRUE, E.FALSE, FLAG])
    inner = integers(max(depth - 1, 0))
    compare = st.one_of(*(_node(op, inner, inner) for op in ("le", "lt", "eq", "ne")))
    if depth <= 0:
        return st.one_of(compare, compare, constants)
    truth = booleans(depth - 1)
    return st.one_of(
        compare,
        compare,
        constants,
        _node("and", truth, truth),
        _node("or", truth, truth),
        _node("not", truth),
        _node("and", truth, truth, truth),
        _node("where", truth, truth, truth),
        _node("eq", truth, st.sampled_from([E.TRUE, E.FALSE, E.ZERO, E.ONE, E.const(2)])),
        _node("not", inner),
    )


def floats(depth: int) -> st.SearchStrategy[Tree]:
    """Real expressions over x, y > 0 and z > 0."""
    leaves: st.SearchStrategy[Tree] = st.one_of(
        st.sampled_from([X, Y, Z, I, J]), st.sampled_from([0.5, -2.0, 1.0, 0.0, 3, -1]).map(E.const)
    )
    if depth == 0:
        return leaves
    inner, truth = (
        floats(depth - 1),
        st.one_of(booleans(1), _node("le", floats(0), floats(0)), _node("lt", floats(0), floats(0))),
    )
    positive: st.SearchStrategy[Tree] = st.sampled_from([Y, Z, E.const(4.0), N0, ("mul", Y, Z), ("exp", X)])
    if depth > 1:
        positive = st.one_of(positive, _node("exp", inner), _node("add", st.just(Y), _node("abs", inner)))
    return st.one_of(
        leaves,
        _node("add", inner, inner),
        _node("add", inner, inner, inner),
        _node("mul", inner, inner),
        _node("mul", inner, inner),
        _node("sub", inner, inner),
        _node("neg", inner),
        _node("div", inner, positive),
        _node("exp", inner),
        _node("log", positive),
        _node("recip", positive),
        _node("where", truth, inner, inner),
        _node("abs", inner),
        _node("min", inner, inner),
        _node("max", inner, inner),
        _node("tanh", inner),
        _node("sqrt", positive),
        _node("pow", inner, st.sampled_from([E.const(2), E.const(1), E.const(3)])),
        _node("pow", positive, st.sampled_from([E.const(-1), E.const(0.5), E.const(-0.5), E.const(2.5)])),
        _node("mul", truth, inner),
        _node("mul", _node("sub", st.just(E.const(1.0)), truth), st.just(E.const(-1e9))),
    )


def masked(depth: int) -> st.SearchStrategy[Tree]:
    """Real expressions, some branches of which are minus infinity."""
    inner = floats(1)
    mask = _node("where", booleans(1), inner, st.just(E.NEG_INF))
    other = _node("where", booleans(1), st.just(E.NEG_INF), inner)
    bias = _node("where", booleans(1), st.just(E.const(0.0)), st.just(E.NEG_INF))
    base = st.one_of(mask, other, bias)
    if depth == 0:
        return base
    deeper = masked(depth - 1)
    return st.one_of(
        base,
        _node("add", deeper, inner),
        _node("add", inner, deeper, bias),
        _node("add", deeper, deeper),
        _node("where", booleans(1), deeper, inner),
        _node("mul", st.sampled_from([E.const(0.5), E.const(3), Y]), deeper),
        _node("sub", deeper, inner),
        _node("div", deeper, st.just(Y)),
    )


VALUES = ({"x": -1.3, "y": 0.7, "z": 2.2, "flag": True}, {"x": 0.0, "y": 1.0, "z": 0.25, "flag": False})


def points(sizes: tuple[tuple[int, int], ...]) -> Any:
    for n0, n1 in sizes:
        for i, j, k in itertools.product(range(3), range(n0), range(6)):
            yield {I: i, J: j, K: k, "n0": n0, "n1": n1}


ALL_SIZES = ((1, 1), (1, 3), (2, 1), (3, 2), (4, 5))
FEW_SIZES = ((1, 2), (3, 1))


def agree(
    number: Callable[..., Any], tree: Tree, found: Expr, sizes: tuple[tuple[int, int], ...], exact: bool,
    values: tuple[Mapping[str, Any], ...] = VALUES,
) -> None:  # fmt: skip
    written = plain(tree)
    for value, point in itertools.product(values, points(sizes)):
        read = lambda name, _, value=value: value[name]  # noqa: E731
        wanted = number(written, point, read)
        if wanted != wanted or (abs(wanted) > 1e12 and math.isfinite(wanted)):
            continue
        got = number(found, point, read)
        close = (
            got == wanted
            if exact or not math.isfinite(wanted)
            else math.isclose(got, wanted, rel_tol=1e-7, abs_tol=1e-7)
        )
        if not exact and not math.isfinite(wanted) and not close:
            close = abs(got) > 700 and (got > 0) == (wanted > 0)  # exp out of range, which algebra avoids
        place = ", ".join(f"{name}={at}" for name, at in [*point.items(), *value.items()])
        assert close, f"{got} instead of {wanted} by {found} for {written} at {place}"


@given(tree=integers(3))
@settings(max_examples=300)
def test_integer_algebra_keeps_every_value(tree: Tree, number: Callable[..., Any]) -> None:
    agree(number, tree, simplified(tree), ALL_SIZES, True)


@given(tree=booleans(3))
@settings(max_examples=300)
def test_boolean_algebra_keeps_every_value(tree: Tree, number: Callable[..., Any]) -> None:
    agree(number, tree, simplified(tree), ALL_SIZES, True)


@given(tree=floats(3))
@settings(max_examples=250)
def test_real_algebra_keeps_every_value(tree: Tree, number: Callable[..., Any]) -> None:
    agree(number, tree, simplified(tree), FEW_SIZES, False)


@given(tree=masked(2))
@settings(max_examples=150)
def test_minus_infinity_absorbs_what_is_added_and_nothing_else(
    tree: Tree, number: Callable[..., Any]
) -> None:
    agree(number, tree, simplified(tree), FEW_SIZES, False)


@given(tree=masked(1), other=floats(1))
@settings(max_examples=150)
def test_exponentials_of_masked_scores_keep_every_value(
    tree: Tree, other: Tree, number: Callable[..., Any]
) -> None:
    for whole in (
        ("exp", tree),
        ("mul", ("exp", tree), other),
        ("mul", ("exp", tree), ("exp", other)),
        ("exp", ("sub", tree, ("log", Y))),
    ):
        agree(number, whole, simplified(whole), FEW_SIZES, False)


@given(tree=st.one_of(integers(2), floats(2)), place=integers(1))
@settings(max_examples=150)
def test_substitution_is_evaluation_at_the_substitute(
    tree: Tree, place: Tree, number: Callable[..., Any]
) -> None:
    """k is replaced by something that stays within 0 .. 5."""
    within: Tree = ("mod", place, E.const(6))

    def put(node: Tree) -> Tree:
        return (
            within
            if node is K
            else node
            if isinstance(node, Expr)
            else (node[0], *(put(n) for n in node[1:]))
        )

    found = M.substitute(simplified(tree), {K: simplified(within)})
    agree(number, put(tree), found, FEW_SIZES, False)


@given(tree=st.one_of(integers(2), booleans(2)))
@settings(max_examples=100)
def test_simplifying_again_changes_no_value(tree: Tree, number: Callable[..., Any]) -> None:
    again = E.rebuild(simplified(tree), M.construct)
    agree(number, tree, again, FEW_SIZES, True)


@given(tree=integers(3))
@settings(max_examples=200)
def test_bounds_hold_at_every_point(tree: Tree, number: Callable[..., Any]) -> None:
    found = simplified(tree)
    low, high = ranges.bounds(ranges.polynomial(found))
    for point in points(ALL_SIZES):
        value = number(found, point, lambda name, _: VALUES[0][name])
        for bound, holds in ((low, lambda b, v: b <= v), (high, lambda b, v: v <= b)):
            if bound is not None:
                limit = sum(
                    c * math.prod(number(a, point, None) for a in atoms) for atoms, c in bound.items()
                )
                assert holds(limit, value), f"{found}: {value} against {limit}"


def test_a_clamped_difference_of_indices_lies_between_the_numbers() -> None:
    q, k = (E.var(name, E.size(extent)) for name, extent in (("q", "s0"), ("k", "s1")))
    near = M.function("min", M.function("max", M.sub(q, k), E.const(-255)), E.const(255))
    assert ranges.bounds(ranges.polynomial(M.add(near, E.const(255)))) == ({}, {(): 510})


@given(body=integers(2))
@settings(max_examples=80)
def test_a_sum_over_an_index_is_the_sum_of_its_terms(body: Tree, number: Callable[..., Any]) -> None:
    found = M.total(K, simplified(body))
    for point in points(FEW_SIZES):
        outer = {p: v for p, v in point.items() if p is not K}
        terms = [number(plain(body), {**outer, K: k}, lambda n, _: VALUES[0][n]) for k in range(6)]
        assert number(found, outer, lambda n, _: VALUES[0][n]) == sum(terms)


def test_bound_variables_are_renamed_alike_and_free_ones_not_captured() -> None:
    def sum_of(name: str) -> Expr:
        v = E.var(name, N0)
        return M.total(v, M.mul(E.read("x", (v,), "float"), E.read("y", (v, K), "float")))

    assert M.canonical_binders(sum_of("a")) is M.canonical_binders(sum_of("b"))
    inner, outer = E.var("a", N0), E.var("b", N0)
    nested = M.total(outer, M.total(inner, E.read("x", (outer, inner), "float")))
    swapped = M.total(inner, M.total(outer, E.read("x", (outer, inner), "float")))
    assert M.canonical_binders(nested) is not M.canonical_binders(swapped)


HALF = M.floordiv(M.add(N0, E.ONE), E.const(2))
LESS = M.sub(HALF, E.ONE)
"""Sizes that may be 0, as far as anybody knows, unless a variable runs up to them."""
ROW, COLUMN = E.var("row", LESS), E.var("column", LESS)
SHIFTED = M.add(COLUMN, M.mul(ROW, M.sub(M.mul(E.const(2), LESS), E.ONE)), LESS)

EQUAL: dict[str, tuple[Expr, Expr]] = {
    "x - x": (M.sub(X, X), E.ZERO),
    "2x + 3x": (M.add(M.mul(E.const(2), X), M.mul(E.const(3), X)), M.mul(E.const(5), X)),
    "order of a sum": (M.add(X, Y, I), M.add(I, M.add(Y, X))),
    "order of a product": (M.mul(X, Y), M.mul(Y, X)),
    "x / y * y": (M.mul(M.div(X, Y), Y), X),
    "exp(x) exp(y)": (M.mul(M.exp(X), M.exp(Y)), M.exp(M.add(X, Y))),
    "exp(x) / exp(y)": (M.div(M.exp(X), M.exp(Y)), M.exp(M.sub(X, Y))),
    "exp(x - log y)": (M.exp(M.sub(X, M.log(Y))), M.div(M.exp(X), Y)),
    "log exp x": (M.log(M.exp(X)), X),
    "(6i + k) // 6": (M.floordiv(M.add(M.mul(I, E.const(6)), K), E.const(6)), I),
    "(6i + k) % 6": (M.mod(M.add(M.mul(I, E.const(6)), K), E.const(6)), K),
    "(n0 i + j) // n0": (M.floordiv(M.add(M.mul(I, N0), J), N0), I),
    "(n0 i + j) % n0": (M.mod(M.add(M.mul(I, N0), J), N0), J),
    "(m m - 2 m + 1) // (m - 1)": (
        M.floordiv(M.add(M.mul(HALF, HALF), M.mul(E.const(-2), HALF), E.ONE), LESS),
        LESS,
    ),
    "(j m - j) % (m - 1)": (M.mod(M.mul(J, LESS), LESS), E.ZERO),
    "a relative shift by a size from others": (M.floordiv(SHIFTED, M.mul(E.const(2), LESS)), ROW),
    "its other digit": (M.mod(SHIFTED, M.mul(E.const(2), LESS)), M.add(LESS, COLUMN, M.neg(ROW))),
    "both digits of j by m - 1": (
        M.mod(M.add(M.mul(LESS, M.floordiv(J, LESS)), M.mod(J, LESS)), HALF),
        M.mod(J, HALF),
    ),
    "k < 6": (M.lt(K, E.const(6)), E.TRUE),
    "j < n0": (M.lt(J, N0), E.TRUE),
    "k <= j is j >= k": (M.le(K, J), M.not_(M.lt(J, K))),
    "k - j <= 0": (M.le(M.sub(K, J), E.ZERO), M.le(K, J)),
    "2k < 2j + 1": (M.lt(M.mul(E.const(2), K), M.add(M.mul(E.const(2), J), E.ONE)), M.le(K, J)),
    "not not": (M.not_(M.not_(FLAG)), FLAG),
    "p and not p": (M.and_(FLAG, M.not_(FLAG)), E.FALSE),
    "p or not p": (M.or_(M.not_(FLAG), FLAG), E.TRUE),
    "p or -inf, twice": (
        M.add(M.where(FLAG, E.const(0.0), E.NEG_INF), M.where(FLAG, X, E.NEG_INF)),
        M.where(FLAG, X, M.add(E.NEG_INF, E.NEG_INF)),
    ),
    "the logarithm of a mask": (M.log(FLAG), M.where(FLAG, E.const(0.0), E.NEG_INF)),
    "zero times what is masked": (
        M.mul(E.const(0.0), M.where(FLAG, X, E.NEG_INF)),
        M.where(FLAG, E.const(0.0), E.NAN),
    ),
    "(1 - p) * -1e9": (M.mul(M.sub(E.const(1.0), FLAG), E.const(-1e9)), M.where(FLAG, E.ZERO, E.const(-1e9))),
    "k <= j and k <= j + 2": (M.and_(M.le(K, J), M.le(K, M.add(J, E.const(2)))), M.le(K, J)),
    "k > j or k > j - 3": (M.or_(M.lt(J, K), M.lt(M.sub(J, E.const(3)), K)), M.lt(M.sub(J, E.const(3)), K)),
    "diagonals that never meet": (
        M.add(*(M.where(M.eq(M.add(K, E.const(n)), J), E.ONE, E.ZERO) for n in range(3))),
        M.where(M.or_(*(M.eq(M.add(K, E.const(n)), J) for n in (2, 0, 1))), E.ONE, E.ZERO),
    ),
    "a triangle and the diagonal above it": (
        M.add(M.where(M.le(K, J), X, E.ZERO), M.where(M.eq(K, M.add(J, E.ONE)), X, E.ZERO)),
        M.where(M.or_(M.le(K, J), M.eq(K, M.add(J, E.ONE))), X, E.ZERO),
    ),
    "min of two masks": (
        M.function("min", M.where(FLAG, E.ONE, E.ZERO), M.where(M.le(K, J), E.ONE, E.ZERO)),
        M.where(M.and_(FLAG, M.le(K, J)), E.ONE, E.ZERO),
    ),
    "|k - j| <= 2": (
        M.le(M.absolute(M.sub(K, J)), E.const(2)),
        M.and_(M.le(K, M.add(J, E.const(2))), M.le(J, M.add(K, E.const(2)))),
    ),
}


MEETING = {
    "a triangle and a diagonal of it": (M.le(K, J), M.eq(M.add(K, E.ONE), J)),
    "two triangles": (M.le(K, J), M.le(J, K)),
    "a flag and a diagonal": (FLAG, M.eq(K, J)),
    "either of two and one of them": (M.or_(M.eq(K, J), FLAG), M.eq(K, M.add(J, E.ONE))),
}


@pytest.mark.parametrize("name", list(MEETING))
def test_conditions_that_may_hold_at_once_do_not_exclude_each_other(name: str) -> None:
    assert not M.exclude_each_other(*MEETING[name])


@pytest.mark.parametrize("name", list(EQUAL))
def test_two_spellings_become_the_same_object(name: str) -> None:
    one, other = EQUAL[name]
    assert one is other or (E.is_const(one) and E.is_const(other, one.value))


@pytest.mark.parametrize("name", ["min", "max"])
def test_nan_goes_through_extremes_of_constants(name: str, number: Callable[..., Any]) -> None:
    for args in ((E.NAN, E.ONE), (E.ONE, E.NAN), (E.NAN, E.NAN)):
        assert math.isnan(number(M.function(name, *args), {}, None))


def test_nan_times_zero_is_not_zero(number: Callable[..., Any]) -> None:
    assert math.isnan(number(M.mul(E.ZERO, E.NAN), {}, None))
    assert math.isnan(number(M.add(E.NAN, E.ONE), {}, None))


def test_an_infinite_factor_is_not_multiplied_into_a_sum(number: Callable[..., Any]) -> None:
    found = M.mul(M.exp(E.const(1e9)), M.add(X, Y))
    assert number(found, {}, lambda name, _: {"x": -1.3, "y": 0.7}[name]) == -math.inf


def test_constants_stay_real_numbers(number: Callable[..., Any]) -> None:
    for base, exponent in ((-8.0, 1 / 3), (-1, 0.5), (-2.0, -0.3)):
        found = M.power(E.const(base), E.const(exponent))
        assert not any(isinstance(n.value, complex) for n in E.walk(found))
        assert math.isnan(number(found, {}, None))
    assert number(M.recip(E.const(-math.inf)), {}, None) == 0
    assert number(M.exp(E.NEG_INF), {}, None) == 0
    assert number(M.exp(E.const(705.0)), {}, None) == pytest.approx(math.exp(705.0))
    assert number(M.exp(E.const(800.0)), {}, None) == math.inf


def test_a_fraction_times_sums_of_integers_stays_a_fraction(number: Callable[..., Any]) -> None:
    tree: Tree = ("mul", E.const(0.5), ("add", I, E.ONE), ("add", J, E.ONE))
    agree(number, tree, simplified(tree), ALL_SIZES, exact=True)


def test_a_large_multiple_of_a_mask_of_integers_is_exactly_zero_where_the_mask_is() -> None:
    mask = E.read("mask", (I,), "int")
    dropped = M.mul(M.sub(E.ONE, mask), E.const(-(10**9)))
    assert dropped.op == "mul" and dropped.args[1] is M.sub(E.ONE, mask)
    assert M.mul(E.const(1000), M.add(I, E.const(5))) is M.add(M.mul(E.const(1000), I), E.const(5000))


@pytest.mark.parametrize("join", [M.add, M.mul, M.and_, M.eq])
def test_a_form_does_not_depend_on_what_was_made_before(join: Callable[..., Expr]) -> None:
    """A sum of three terms has one order of rounding, whatever else the process has compiled."""
    makes: list[Callable[[], Expr]] = [
        lambda: M.function("sin", E.read("u10", (), "float")), lambda: E.read("u9", (), "float"),
        lambda: M.mul(E.read("v", (), "float"), E.read("w", (), "float")),
    ]  # fmt: skip
    if join is M.and_:
        makes = [lambda m=m: M.lt(m(), E.ZERO) for m in makes]  # type: ignore[misc]
    found = set()
    for order in itertools.permutations(range(2 if join is M.eq else 3)):
        made = {n: makes[n]() for n in order}
        found.add(str(join(*made.values())))
        del made  # what was made is forgotten with its last user
    assert len(found) == 1
