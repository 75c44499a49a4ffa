"""Dropout in the float64 check: a model's own random draws are replaced by those of the fused program.

Both then keep and drop the same elements, by `random(seed, indices)`, so a claim about a model that drops
weights can be checked element by element.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.call import argument
from attngraph.ir.ops.dropout import dropout, kept_elements

SEED = 2**31 + 12345


def draws(node: fx.Node) -> Callable[..., Any] | None:
    """A function of the operands that computes a node with random draws; None for other nodes."""
    match str(node.target):
        case "attngraph.seed.default":
            return lambda: torch.tensor(SEED)
        case "aten.dropout.default" | "aten.native_dropout.default":
            return lambda value, *_, **__: drop(node, value, value.shape)
        case "aten.scaled_dot_product_attention.default" if argument(node, "dropout_p"):
            return _attention
    return None


def drop(
    node: fx.Node, value: Tensor, shape: Sequence[int], box: Sequence[Sequence[int] | None] | None = None
) -> Any:
    """What a dropout leaves of its operand.

    Args:
        shape: that of the whole operand.
        box: the indices that `value` has of each dimension; None: all.
    """
    parts = "native" in str(node.target)
    rate = float(argument(node, "p"))
    if argument(node, "train") is False or rate == 0:
        return (value, torch.ones_like(value, dtype=torch.bool)) if parts else value
    kept = kept_elements(SEED, shape, rate, value.device, box)
    result = dropout(value, SEED, rate, kept)
    return (result, kept) if parts else result


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's attention by its definition, with the dropout of the fused program."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        shown = 0.0 if attn_mask.dtype == torch.bool else attn_mask.masked_fill(hidden, 0.0)
        scores = (scores + shown).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    weights = torch.where(weights.isnan(), 0.0, weights)
    return dropout(weights, SEED, dropout_p) @ v
