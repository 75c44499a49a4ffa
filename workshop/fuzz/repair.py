"""Replacing choices that contradict each other, so that any combination becomes a case that runs.

A replacement is simpler than what it replaces wherever that is possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from workshop.fuzz.grammar import ADDITIVE, CHOICES, Case

_SIZES = ("batch", "heads", "repeats", "queries", "keys", "width", "value_width")
PACKED = frozenset({"packed", "packed_chunks", "packed_per_head", "packed_last", "channels"})
_LITERAL_HEADS = PACKED | {"joined", "flat"}
_UNSHIFTED = frozenset({"exp", "exp2", "after_values", "plus_one", "sink_after_values"})
_SELF_MASKS = frozenset({"documents", "separators", "padding_both"})
_POSITION_MASKS = frozenset(
    {"none", "causal", "causal_triu", "causal_positions", "window", "dilated", "blocks"}
)
_POSITION_BIASES = frozenset({"none", "alibi", "alibi_by_key", "table", "on_queries"})
_OF_THE_WEIGHTS = frozenset(
    {"softmax_over_heads", "softmax_over_queries", "talking_after", "renormalised", "squared", "sigmoid",
     "double_softmax", "weights_returned", "weights_transposed", "weights_used_twice",
     "weights_changed_in_place", "weights_detached", "scores_changed_between"}
)  # fmt: skip
_OF_THE_HEADS = frozenset({"softmax_over_heads", "talking_before", "talking_after", "heads_swapped"})
_OF_GRADIENTS = frozenset({"weights_detached", "keys_detached", "scores_without_grad"})


def repaired(case: Case) -> Case:
    """The case with choices that contradict each other replaced; itself where there are none."""
    values = dataclasses.asdict(case)
    for _ in range(8):  # one replacement may call for another
        before = Case(**values)
        values |= dict(_repairs(before))
        if Case(**values) == before:
            return before
    raise AssertionError(f"the repairs of {case} never end")


def _repairs(c: Case) -> Iterator[tuple[str, Any]]:
    """Fields to set, for each contradiction; of two settings of one field the last counts."""
    yield from _shape_repairs(c)
    yield from _mask_repairs(c)
    yield from _change_repairs(c)
    if c.softmax in _UNSHIFTED | {"to_float32"} and c.numbers == "large":
        yield "numbers", "normal"  # a softmax without its maximum overflows
    if c.softmax == "logsumexp" and c.fill in {"-3.4e38", "lowest"} and c.mask not in _POSITION_MASKS:
        yield "fill", "-inf"  # added to it, the log of an empty row's number of keys is rounded away
    if c.softmax in {"after_values", "sink_after_values"}:
        yield "weights", "none"
    if c.numbers == "nan_query":
        yield "grad", False  # how NaN spreads in a backward pass is not specified
        if c.weights == "nan_to_num" or "times" in (c.apply, c.apply2):
            yield "numbers", "normal"  # these masks and rows are taken to have no NaN
    if c.apply2 == "times" and c.mask2 != "none" and c.mask != "none" and c.fill == "-inf":
        yield "grad", False  # minus infinity times zero is NaN
    if c.weights == "masked" and c.mask not in _POSITION_MASKS:
        yield "grad", False  # NaN of a fully masked row does not reach keys of masked weights
    if c.sizes == "numbers":
        yield "second", False  # other sizes would be traced as another graph
    if not c.second:
        yield from ((f"{name}2", CHOICES[f"{name}2"][0]) for name in _SIZES if name != "repeats")


def _shape_repairs(c: Case) -> Iterator[tuple[str, Any]]:
    if c.layout in PACKED | {"single", "flat"} and c.groups != "none":
        yield "groups", "none"
    if c.groups == "none":
        yield "repeats", 1
    elif c.repeats == 1:
        yield "repeats", 2
    if c.layout == "single" or c.groups == "shared":
        yield from (("heads", 1), ("heads2", 1))
    elif c.layout in _LITERAL_HEADS and c.second:
        yield "heads2", c.heads
    if c.layout in PACKED:
        yield from (("tokens", "self"), ("value_width", c.width), ("value_width2", c.width2))
    if c.tokens == "self":
        yield from (("keys", c.queries), ("keys2", c.queries2))
    if c.groups in {"queries", "shared"} and c.dot in {"bmm", "baddbmm", "baddbmm_empty"}:
        yield "dot", "matmul"
    if c.groups in {"queries", "shared"} and c.values == "bmm":
        yield "values", "matmul"
    if c.layout in {"single", "flat"} or c.groups == "queries":
        if c.dot == "einsum_heads_last":
            yield "dot", "einsum"
        if c.values == "einsum_tokens_first":
            yield "values", "einsum"


def _mask_repairs(c: Case) -> Iterator[tuple[str, Any]]:
    if c.mask == "none":
        yield from (("apply", "fill"), ("fill", "-inf"), ("mask2", "none"))
        if c.scale == "after_mask":
            yield "scale", "literal"
    if c.mask2 == "none":
        yield from (("apply2", "fill"), ("fill2", "-inf"))
    if c.tokens == "cross":
        if c.mask in _SELF_MASKS:
            yield "mask", "padding"
        if c.mask2 in _SELF_MASKS:
            yield "mask2", "padding"
    for apply, fill, name in ((c.apply, c.fill, "fill"), (c.apply2, c.fill2, "fill2")):
        if apply == "logarithm":
            yield name, "-inf"
        if apply in {"one_minus", "times"} and fill == "-inf":
            yield name, "-1e9"  # zero times infinity
        if apply in ADDITIVE and fill == "lowest":
            yield name, "-1e9"  # the sum of two overflows
        if c.softmax == "to_float32" and (
            fill in {"-3.4e38", "lowest"} or (apply in ADDITIVE and fill != "-inf")
        ):
            yield "softmax", "softmax"  # the narrower type has other infinities, and rounds large fills


def _change_repairs(c: Case) -> Iterator[tuple[str, Any]]:
    if c.change in _OF_THE_WEIGHTS and c.softmax in {"after_values", "sink_after_values"}:
        yield "softmax", "softmax"
    if c.change in {"sigmoid", "softmax_over_heads", "scores_changed_between"}:
        yield "softmax", "softmax"
    if c.change == "scores_changed_after" and c.softmax in {"stable", "stable_max", "logsumexp"}:
        yield "softmax", "softmax"  # the backward pass needs the original scores
    if c.change in _OF_THE_HEADS and (c.layout in {"single", "flat"} or c.groups in {"queries", "shared"}):
        yield "change", "none"
    if c.change == "keys_reshaped":
        yield "dot", "matmul"
        if c.layout == "channels" or c.groups == "queries":
            yield "change", "none"
    if c.change == "weights_transposed":
        yield "tokens", "self"
    if c.change == "weights_used_twice":
        yield from (("value_width", c.width), ("value_width2", c.width2))
    if c.change == "top_k":
        yield from ((name, 2) for name in ("queries", "keys", "queries2", "keys2") if getattr(c, name) == 1)
    if c.change == "every_second_key" and not (
        {c.mask, c.mask2} <= _POSITION_MASKS and c.bias in _POSITION_BIASES
    ):
        yield "change", "none"  # tensors with an entry per key would be too long
    if c.change == "argument_changed":
        yield "grad", False
    if c.change in _OF_GRADIENTS:
        yield "grad", True
    if c.change == "scores_without_grad":
        yield "in_place", False  # a view made without gradients cannot be written to
