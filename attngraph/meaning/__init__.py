"""Facts about a graph: what its values are, found by algebra. Nothing here edits a graph."""

from attngraph.meaning import rules
from attngraph.meaning.algebra import M, evaluate_size, recombined, size_expression, split_digits, to_sympy
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import ELEMENTWISE, RULES, Category, Unliftable, category_of, is_part, tried

__all__ = [
    "ELEMENTWISE", "RULES", "Category", "M", "Meaning", "Unliftable", "category_of", "evaluate_size",
    "is_part", "recombined", "rules", "size_expression", "split_digits", "to_sympy", "tried",
]  # fmt: skip
