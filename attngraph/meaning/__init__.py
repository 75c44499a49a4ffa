"""Facts about a graph: what its values are, found by algebra. Nothing here edits a graph."""

from attngraph.meaning import rules
from attngraph.meaning.algebra import M, evaluate_size, recombined, size_expression, split_digits
from attngraph.meaning.element import Meaning
from attngraph.meaning.rule import ELEMENTWISE, RULES, Category, Unliftable, category_of, is_part

__all__ = [
    "ELEMENTWISE", "RULES", "Category", "M", "Meaning", "Unliftable", "category_of", "evaluate_size",
    "is_part", "recombined", "rules", "size_expression", "split_digits",
]  # fmt: skip
