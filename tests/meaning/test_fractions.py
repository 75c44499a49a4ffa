"""Quotients of sums of exponentials: equal references cancel, whatever they are, and what differs stays."""

from __future__ import annotations

from attngraph.ir.language import expr as E
from attngraph.ir.language.expr import Expr
from attngraph.meaning.algebra import M
from attngraph.meaning.algebra.fractions import Value, add, multiply, reciprocal, single


def number(name: str) -> Expr:
    return E.read(name, (), "float")


X, Y, Z, M1, M2, U, V, W = (number(n) for n in ("x", "y", "z", "m1", "m2", "u", "v", "w"))


def exp(exponent: Expr, rest: Expr = E.ONE) -> Value:
    return single(exponent, rest)


def sum_of(*values: Value) -> Value:
    return add(*(fraction for value in values for fraction in value))


def quotient(a: Value, b: Value) -> Value:
    return multiply(a, reciprocal(b))


def product(*values: Value) -> Value:
    found = single(E.ZERO, E.ONE)
    for value in values:
        found = multiply(found, value)
    return found


def test_references_cancel_when_a_sum_is_rescaled() -> None:
    first = exp(M.sub(X, M1))
    total = sum_of(multiply(first, exp(M.sub(M1, M2))), exp(M.sub(Y, M2)))
    assert quotient(total, sum_of(exp(X), exp(Y))) == exp(M.neg(M2))


def test_a_sum_divided_by_itself_is_one_in_any_order_of_its_terms() -> None:
    assert quotient(sum_of(exp(X), exp(Y)), sum_of(exp(Y), exp(X))) == exp(E.ZERO)


def test_results_over_divisors_of_their_own_are_merged_over_the_common_one() -> None:
    a, b = sum_of(exp(X), exp(Y)), exp(Z)
    both = sum_of(a, b)
    one, other = quotient(sum_of(exp(X, U), exp(Y, V)), a), quotient(exp(Z, W), b)
    merged = sum_of(product(one, a, reciprocal(both)), product(other, b, reciprocal(both)))
    assert merged == quotient(sum_of(exp(X, U), exp(Y, V), exp(Z, W)), both)


def test_a_difference_of_shares_is_the_rest() -> None:
    """o - b / (a + b) * (o - w) is (a * o + b * w) / (a + b), as a ring merges its results."""
    a, b = sum_of(exp(X), exp(Y)), exp(Z)
    share = quotient(b, sum_of(a, b))
    o = quotient(sum_of(exp(X, U), exp(Y, V)), a)
    difference = sum_of(o, product(single(E.ZERO, E.ONE, -1.0), exp(E.ZERO, W)))
    merged = sum_of(o, product(single(E.ZERO, E.ONE, -1.0), share, difference))
    assert merged == quotient(sum_of(exp(X, U), exp(Y, V), exp(Z, W)), sum_of(a, b))


def test_a_missing_rescale_does_not_cancel() -> None:
    total = sum_of(exp(M.sub(X, M1)), exp(M.sub(Y, M2)))
    (found,) = quotient(total, sum_of(exp(X), exp(Y)))
    assert len(found.terms) == 2 and list(found.powers.values()) == [-1]


def test_other_numbers_are_other_sums() -> None:
    assert quotient(sum_of(exp(X), exp(Y)), sum_of(exp(X), exp(Z))) != exp(E.ZERO)
    assert quotient(sum_of(exp(X), exp(Y)), sum_of(exp(X), exp(Y), exp(Y))) != exp(E.ZERO)
    assert sum_of(exp(X), product(single(E.ZERO, E.ONE, -1.0), exp(X))) == ()
