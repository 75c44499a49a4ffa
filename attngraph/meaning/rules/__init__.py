"""The element rules, by what an op does to elements. Importing this registers them (`meaning/rule.py`)."""

from attngraph.meaning.rules import (
    assignment,
    bits,
    contraction,
    index,
    movement,
    pointwise,
    reduction,
    writes,
)

__all__ = ["assignment", "bits", "contraction", "index", "movement", "pointwise", "reduction", "writes"]
