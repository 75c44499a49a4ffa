"""Canonical forms of expressions, bounds of their values, sizes, and digits of indices."""

from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.digits import Digits, extent, numbers, recombined, split_digits, taken_apart
from attngraph.meaning.algebra.sizes import SizeNames, evaluate_size, is_example, size_expression, to_sympy
from attngraph.meaning.algebra.sums import SumOfProducts, open_sums, sum_of_products

__all__ = [
    "Digits", "M", "SizeNames", "SumOfProducts", "evaluate_size", "extent", "is_example", "numbers",
    "open_sums", "ranges", "recombined", "size_expression", "split_digits", "sum_of_products",
    "taken_apart", "to_sympy",
]  # fmt: skip
