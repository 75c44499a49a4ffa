"""The element rules, by what an op does to elements. Importing this registers them (`meaning/rule.py`)."""

from attngraph.meaning.rules import (
    assignment,
    bits,
    collectives,
    contraction,
    index,
    movement,
    pointwise,
    pooling,
    reduction,
    writes,
)

__all__ = [
    "assignment", "bits", "collectives", "contraction", "index", "movement", "pointwise", "pooling",
    "reduction", "writes",
]  # fmt: skip
