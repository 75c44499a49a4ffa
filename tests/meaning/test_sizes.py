"""Sizes that a model rounds are formulas of whole numbers, and equal to Python's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import sympy
from torch.utils._sympy.functions import CeilToInt, FloatTrueDiv, FloorDiv, FloorToInt, IntTrueDiv, ToFloat

from attngraph.ir.language import expr as E
from attngraph.meaning.algebra import simplify
from attngraph.meaning.algebra.sizes import (
    SizeNames,
    evaluate_size,
    example_size,
    from_sympy,
    size_expression,
)
from attngraph.meaning.rule import Unliftable

N, M = sympy.symbols("n m", integer=True, positive=True)
ROUNDED: dict[str, tuple[sympy.Expr, Callable[[int, int], int]]] = {
    "ceil(n / 4)": (CeilToInt(IntTrueDiv(N, 4)), lambda n, m: math.ceil(n / 4)),
    "ceil(n / m)": (CeilToInt(IntTrueDiv(N, M)), lambda n, m: math.ceil(n / m)),
    "ceil(n * 0.75)": (CeilToInt(0.75 * ToFloat(N)), lambda n, m: math.ceil(n * 0.75)),
    "floor(n / m)": (FloorToInt(IntTrueDiv(N, M)), lambda n, m: n // m),
    "floor(float(n) / 3)": (FloorToInt(FloatTrueDiv(ToFloat(N), sympy.Integer(3))), lambda n, m: n // 3),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_rounded_quotient_is_what_python_computes(name: str) -> None:
    formula, wanted = ROUNDED[name]
    found = from_sympy(formula)
    for n in range(1, 30):
        for m in range(1, 9):
            assert evaluate_size(found, {"n": n, "m": m}) == wanted(n, m)


def test_a_product_that_is_rounded_before_is_refused_in_plain_words() -> None:
    with pytest.raises(Unliftable, match="a size that is no formula of whole numbers"):
        from_sympy(CeilToInt(0.1 * ToFloat(N)))


def test_an_example_of_a_size_stands_for_any() -> None:
    with example_size(11):
        tokens, twice, other = map(size_expression, (11, 22, 12))
    assert tokens.op == "size" and twice is simplify.mul(E.const(2), tokens) and other is E.const(12)
    assert evaluate_size(twice, {}) == 22
    assert size_expression(11) is E.const(11)


def test_nothing_follows_from_how_small_an_example_is() -> None:
    within = [simplify.lt(E.var("q", size), E.const(48)) for size in (E.const(11), E.size("11"))]
    assert within[0].op == "const" and within[1].op != "const"


RELATED = {
    "a symbol that speaks of itself": (
        [sympy.Eq(N, 2048 - sympy.Max(0, 2048 - N))], 2048 - sympy.Max(0, 2048 - N), N,
    ),
    "a part of what such a relation names": (
        [sympy.Eq(N, 2048 - sympy.Max(0, 2048 - N))], sympy.Max(0, 2048 - N) + 5, 2053 - N,
    ),
    "the same of a symbol that has another name": (
        [sympy.Eq(M, 9 - sympy.Max(0, 9 - M)), sympy.Eq(M, N)], sympy.Max(0, 9 - M), 9 - N,
    ),
    "two symbols": ([sympy.Eq(M, N)], M * 3, N * 3),
    "multiples of a number": ([sympy.Eq(8 * N, 72)], N + M, M + 9),
    "multiples of a product": ([sympy.Eq(6 * M, 4 * M * N - 4 * M * N + 12 * N)], M, 2 * N),
    "a product of which no part is known": ([sympy.Eq(2 * N, 3 * M)], 2 * N, 3 * M),
}  # fmt: skip


@pytest.mark.parametrize("name", RELATED)
def test_sizes_that_are_equal_have_one_name(name: str) -> None:
    relations, formula, wanted = RELATED[name]
    names = SizeNames(relations)
    assert names.of(from_sympy(formula)) is names.of(from_sympy(wanted))
    assert names.of(from_sympy(wanted)) is from_sympy(wanted)


def test_a_name_never_contains_what_it_stands_for() -> None:
    area, part = N * M, FloorDiv(N * M, sympy.Symbol("p", integer=True, positive=True))
    names = SizeNames([sympy.Eq(area, part * sympy.Symbol("p", integer=True, positive=True))])
    assert names.of(from_sympy(area)) is from_sympy(area)


def test_what_no_relation_speaks_of_keeps_its_name() -> None:
    names = SizeNames([sympy.Eq(N, 2048 - sympy.Max(0, 2048 - N)), sympy.Ne(N, 5)])
    for formula in (sympy.Max(0, 2047 - N), N + 1, M):
        assert names.of(from_sympy(formula)) is from_sympy(formula)
