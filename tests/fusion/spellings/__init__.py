"""Spellings of attention, each a function of tensors with the operands to call it with, by topic.

`MUST_FUSE` are attention whichever way they are put, and fuse to `COUNT` attentions (one, unless it says
otherwise). `NOT_YET` are attention too, but are left alone so far. `MUST_NOT` are near misses: things that
look like attention, one change away from it, and have another meaning. `MUTANTS` are a spelling with one
thing changed, which may fuse only with the meaning that it then has. All are run against eager in float64.

A new spelling is a function in the file of its topic, entered in one of the tables of `registry.py`.
"""

from . import (
    averages,
    biases,
    causal_masks,
    heads,
    key_loops,
    key_parts,
    mutated_masks,
    mutated_operands,
    near_misses,
    padding,
    products,
    score_sets,
    scores,
    shared_scores,
    sinks,
    softmax,
    sums,
    windows,
)
from .registry import COUNT, MUST_FUSE, MUST_NOT, MUTANTS, NOT_YET, TOLERANCE, size, with_padding

TOPICS = (
    scores, score_sets, products, softmax, causal_masks, windows, padding, biases, sinks, heads, key_parts,
    key_loops, sums, averages, shared_scores, near_misses, mutated_masks, mutated_operands,
)  # fmt: skip

__all__ = [
    "COUNT", "MUST_FUSE", "MUST_NOT", "MUTANTS", "NOT_YET", "TOLERANCE", "TOPICS", "size", "with_padding",
]  # fmt: skip
