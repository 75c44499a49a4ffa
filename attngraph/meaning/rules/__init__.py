"""The element rules, by what an op does to elements. Importing this registers them (`meaning/rule.py`)."""

from attngraph.meaning.rules import bits, composed, contraction, index, movement, pointwise, reduction, writes

__all__ = ["bits", "composed", "contraction", "index", "movement", "pointwise", "reduction", "writes"]
