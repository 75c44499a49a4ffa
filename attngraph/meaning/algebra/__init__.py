"""Canonical forms of expressions, bounds of their values, sizes, and digits of indices."""

from attngraph.meaning.algebra import ranges
from attngraph.meaning.algebra import simplify as M
from attngraph.meaning.algebra.digits import Digits, recombined, split_digits
from attngraph.meaning.algebra.sizes import evaluate_size, is_example, size_expression

__all__ = [
    "Digits", "M", "evaluate_size", "is_example", "ranges", "recombined", "size_expression", "split_digits",
]  # fmt: skip
