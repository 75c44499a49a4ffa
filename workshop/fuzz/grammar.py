"""What a random graph is: one choice for each of the things that people spell in different ways.

The first choice of a field is its simplest, so that a failing case can be made simpler field by field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "layout": (
        "heads_first", "tokens_first", "joined", "packed", "packed_chunks", "packed_per_head",
        "packed_last", "flat", "single", "channels",
    ),
    "tokens": ("self", "cross"),
    "groups": ("none", "repeat_interleave", "expand", "queries", "index", "tile", "stack", "shared"),
    "transpose": ("mT", "transpose", "permute", "swapaxes"),
    "in_place": (False, True),
    "dot": (
        "matmul", "einsum", "einsum_heads_last", "bmm", "baddbmm", "baddbmm_empty", "multiply_sum",
        "transposed",
    ),
    "scale": (
        "none", "literal", "scores_times", "scores_over", "q", "k", "both", "tensor", "per_head",
        "after_mask",
    ),
    "bias": (
        "none", "dense", "dense_per_head", "alibi", "alibi_by_key", "table", "table_by_index", "buckets",
        "relative_keys", "on_queries",
    ),
    "softcap": ("none", "before_bias", "after_bias"),
    "mask": (
        "none", "causal", "causal_triu", "causal_positions", "bottom_right", "window", "window_triangles",
        "dilated", "blocks", "prefix", "prefix_lengths", "global", "documents", "separators", "padding",
        "padding_dropped", "padding_integers", "lengths", "dense", "constant",
        "padding_both", "empty_padding", "strict", "future", "entry_changed", "constant_entry_changed",
    ),
    "apply": (
        "fill", "fill_equal_zero", "where", "where_tensor", "add", "add_commuted", "add_where", "one_minus",
        "times", "logarithm",
    ),
    "fill": ("-inf", "-1e9", "-3.4e38", "lowest", "-1e4", "-5.0"),
    "mask2": (
        "none", "causal", "padding", "padding_integers", "window", "documents", "separators", "dense",
        "future",
    ),
    "apply2": ("fill", "where", "add", "one_minus", "times"),
    "fill2": ("-inf", "-1e9", "-1e4", "-5.0"),
    "softmax": (
        "softmax", "function", "to_float64", "to_float32", "log_softmax", "logsumexp", "stable", "stable_max",
        "exp", "exp2", "after_values", "plus_one", "zero_column", "sink", "sink_after_values",
    ),
    "weights": (
        "none", "nan_to_num", "masked", "masked_fill", "head_mask", "no_dropout", "eval_dropout",
    ),
    "values": ("matmul", "einsum", "einsum_tokens_first", "bmm", "multiply_sum", "transposed"),
    "output": ("same", "tokens_first", "joined"),
    "change": (
        "none", "softmax_over_queries", "softmax_over_heads", "keys_reshaped", "talking_before",
        "talking_after", "renormalised", "squared", "double_softmax", "sigmoid", "top_k", "weights_returned",
        "scores_returned", "weights_transposed", "weights_used_twice", "scores_changed_after",
        "scores_changed_between", "weights_changed_in_place", "argument_changed", "keys_rolled",
        "values_reversed", "heads_swapped", "every_second_key", "weights_detached", "keys_detached",
        "scores_without_grad",
    ),
    "numbers": ("normal", "large", "zeros", "nan_query"),
    "grad": (True, False),
    "second": (False, True),
    "batch": (2, 3, 1), "heads": (2, 3, 4, 1), "repeats": (1, 2, 3),
    "queries": (2, 3, 4, 5, 6, 7, 8, 9, 1), "keys": (2, 3, 4, 5, 6, 7, 8, 9, 1),
    "width": (2, 3, 4, 5, 6, 8), "value_width": (2, 3, 4, 5, 6, 8),
    "batch2": (2, 3, 1), "heads2": (2, 3, 4, 1),
    "queries2": (2, 3, 4, 5, 6, 7, 8, 9, 11, 1), "keys2": (2, 3, 4, 5, 6, 7, 8, 9, 11, 1),
    "width2": (2, 3, 4, 5, 6, 8), "value_width2": (2, 3, 4, 5, 6, 8),
    "sizes": ("symbols", "numbers"),
}  # fmt: skip
"""The choices of each field of a case, the simplest first: how the function is written, then the sizes of
the first call and (`...2`) of the second; a size of one comes last, because tracing treats it specially. At
the end, whether sizes are symbols of the graph, as usual, or numbers (`torch._dynamo.mark_static`)."""

NEAR_MISSES: Mapping[str, frozenset[Any]] = {
    "scale": frozenset({"after_mask"}),
    "mask": frozenset({"empty_padding", "strict", "future", "entry_changed", "constant_entry_changed"}),
    "mask2": frozenset({"future"}),
    "fill": frozenset({"-5.0"}),
    "fill2": frozenset({"-5.0"}),
    "change": frozenset(CHOICES["change"][1:]),
    "numbers": frozenset({"nan_query"}),
    "keys": frozenset({1}),
    "keys2": frozenset({1}),
}
"""Choices that make the graph something other than plain attention. (With a single key every weight is 1.)"""

ADDITIVE = frozenset({"add", "add_commuted", "add_where", "one_minus", "times"})
_KEEP_A_KEY = frozenset(
    {"none", "causal", "causal_triu", "causal_positions", "prefix", "prefix_lengths", "global", "constant",
     "padding", "padding_dropped", "padding_integers", "lengths"}
)  # fmt: skip
_KEEP_THE_SAME_TOKEN = frozenset(
    {"bottom_right", "window", "window_triangles", "dilated", "blocks", "documents", "separators"}
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One graph: the choice made for each field of `CHOICES`."""

    layout: str = "heads_first"
    tokens: str = "self"
    groups: str = "none"
    transpose: str = "mT"
    in_place: bool = False
    dot: str = "matmul"
    scale: str = "none"
    bias: str = "none"
    softcap: str = "none"
    mask: str = "none"
    apply: str = "fill"
    fill: str = "-inf"
    mask2: str = "none"
    apply2: str = "fill"
    fill2: str = "-inf"
    softmax: str = "softmax"
    weights: str = "none"
    values: str = "matmul"
    output: str = "same"
    change: str = "none"
    numbers: str = "normal"
    grad: bool = True
    second: bool = False
    batch: int = 2
    heads: int = 2
    repeats: int = 1
    queries: int = 2
    keys: int = 2
    width: int = 2
    value_width: int = 2
    batch2: int = 2
    heads2: int = 2
    queries2: int = 2
    keys2: int = 2
    width2: int = 2
    value_width2: int = 2
    sizes: str = "symbols"

    @property
    def is_attention(self) -> bool:
        """Whether this is attention by construction: no choice is in `NEAR_MISSES`."""
        return not any(getattr(self, name) in misses for name, misses in NEAR_MISSES.items())

    @property
    def may_hide_rows(self) -> bool:
        """Whether a query may be left without any key."""
        kept = _KEEP_A_KEY | (_KEEP_THE_SAME_TOKEN if self.tokens == "self" else frozenset())
        return self.mask not in kept or self.mask2 != "none"

    @property
    def complexity(self) -> int:
        """How far the choices are from the simplest ones."""
        return sum(CHOICES[name].index(value) for name, value in dataclasses.asdict(self).items())

    @property
    def calls(self) -> tuple[dict[str, int], ...]:
        """The sizes B H G R T S D E of each call: heads, key heads, heads per key head, tokens, widths."""
        endings = ("", "2") if self.second else ("",)
        return tuple(self._sizes(ending) for ending in endings)

    def _sizes(self, ending: str) -> dict[str, int]:
        names = ("batch", "heads", "queries", "keys", "width", "value_width")
        B, G, T, S, D, E = (getattr(self, name + ending) for name in names)
        return {"B": B, "H": G * self.repeats, "G": G, "R": self.repeats, "T": T, "S": S, "D": D, "E": E}

    def __str__(self) -> str:
        plain = Case()
        chosen = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return " ".join(chosen) or "the simplest case"
