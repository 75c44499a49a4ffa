"""`attn_implementation="attngraph"`: transformers' attention interface, computed by one fused op.

It computes the same as a model's own eager attention, without `attngraph.compile`: the arguments of the call
are expressed as a score program. While torch.export traces, the same is computed in plain PyTorch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.hf.masks import every_row_sees, formula_of
from attngraph.ir.ops import attention as op

NAME = "attngraph"


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, sinks: Tensor | None = None,
    position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the interface that transformers' models call.

    Args:
        query: `[B, Hq, Sq, D]`. key, value: `[B, Hkv, Skv, D]`, `Hq % Hkv == 0`.
        attention_mask: boolean, True where a key is visible, or floating, added to the scores;
            `[B, H, Sq, Skv]`, each of the first three may be 1. None: causal if `is_causal` (default: the
            module's attribute) and there is more than one query, else all keys are visible.
        scaling: factor of the dot products (None: `D ** -0.5`). softcap: bounds the scores.
        s_aux: `[Hq]`, one sink per head. sinks: one per query, `[B, Hq, Sq, 1]`.
        position_bias: added to the scores, before the mask.

    Returns:
        The output, `[B, Sq, Hq, Dv]`, and None in place of the weights.

    Raises:
        ValueError: weights are requested, or a cache of continuous batching is given.
    """
    _refuse(others)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        narrow = torch.get_autocast_dtype(device)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1)
    if attention_mask is None and query.shape[2] > 1:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    else:
        is_causal = False
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    changes = Changes(scale, softcap, position_bias, attention_mask, is_causal, sinks, dropout)
    if torch.compiler.is_exporting():
        return _spelled_out(query, key, value, changes).transpose(1, 2).contiguous(), None
    program, reads, sizes = _program(query, key, changes)
    with torch.autocast(device, enabled=False):  # kernels choose the dtypes that they compute in
        out = op.attention(query, key, value, program, *reads, sizes=sizes)
    return out.transpose(1, 2).contiguous(), None


class Changes(NamedTuple):
    """What a call does to the scores and the weights, in this order: see `attention`."""

    scale: float
    softcap: float | None
    bias: Tensor | None
    mask: Tensor | None
    is_causal: bool
    sinks: Tensor | None
    dropout: float


def _program(query: Tensor, key: Tensor, changes: Changes) -> tuple[str, list[Tensor], list[int]]:
    """The score program of a call, and the tensors and sizes that it reads."""
    reads: list[Tensor] = []
    sizes: list[int] = []
    lines = [f"s = {changes.scale!r} * dot"]
    if changes.softcap is not None:
        lines.append(f"s = {float(changes.softcap)!r} * tanh(s / {float(changes.softcap)!r})")
    if changes.bias is not None:
        lines.append(f"s = s + {_read(reads, changes.bias, key)}")
    mask = changes.mask
    if mask is not None and mask.dtype == torch.bool:
        # Eager uses a finite fill, so a padding row that sees no key gives finite results and gradients. If
        # there is no such row, minus infinity gives the same results, and its gradients are cheaper.
        fill = "" if every_row_sees(mask) else f" else s - {torch.finfo(query.dtype).max!r}"
        formula = formula_of(mask, query.shape[2], key.shape[2])
        if formula is None:
            lines.append(f"keep {_read(reads, mask, key)}{fill}")
        else:
            lines.append(f"keep {formula.predicate.format(f'r{len(reads)}')}{fill}")
            reads += [] if formula.padding is None else [formula.padding]
            sizes = [formula.offset] if formula.offset else []
    elif mask is not None:
        lines.append(f"s = s + {_read(reads, mask.to(query.dtype), key)}")
    elif changes.is_causal:
        lines.append("keep k <= q")
    if changes.sinks is not None:
        lines.append(f"sink {_read(reads, changes.sinks, key)}")
    if changes.dropout > 0:
        reads.append(torch.ops.attngraph.seed().to(query.device))
        kept = 1.0 - changes.dropout
        lines.append(f"p = where(random(r{len(reads) - 1}[], b, h, q, k) < {kept!r}, p / {kept!r}, 0.0)")
    return "\n".join(lines), reads, sizes


def _spelled_out(query: Tensor, key: Tensor, value: Tensor, changes: Changes) -> Tensor:
    """The same in plain PyTorch, for torch.export: an exported program then contains no attngraph op, and
    `attngraph.compile` sees how masks are computed and fuses it like eager attention."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * changes.scale
    if changes.softcap is not None:
        scores = (scores / changes.softcap).tanh() * changes.softcap
    if changes.bias is not None:
        scores = scores + changes.bias[..., : key.shape[2]]
    mask = changes.mask
    if changes.is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask[..., : key.shape[2]], scores, scores - torch.finfo(query.dtype).max)
    elif mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    if changes.sinks is not None:
        scores = torch.cat([scores, changes.sinks.expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, query.dtype)).to(query.dtype)
    if changes.sinks is not None:
        weights = weights[..., :-1]
    return nn.functional.dropout(weights, changes.dropout) @ value


def _read(reads: list[Tensor], tensor: Tensor, key: Tensor) -> str:
    """Add `tensor`, `[B or 1, H or 1, Sq or 1, Skv or 1]`, to `reads`, and return the expression that reads
    it for a score. It may cover more positions than there are keys (a cache of fixed size)."""
    if tensor.ndim != 4:
        raise ValueError(
            f'attn_implementation="{NAME}" takes a mask or bias of shape [batch, heads, queries, keys], '
            f"found {tuple(tensor.shape)}. Give the model a mask [batch, keys], or one of four dimensions."
        )
    reads.append(tensor[..., : key.shape[2]])
    places = ("0" if size == 1 else index for index, size in zip("bhqk", tensor.shape, strict=True))
    return f"r{len(reads) - 1}[{', '.join(places)}]"


def _refuse(others: dict[str, Any]) -> None:
    """Raise if a model requests something that fused attention does not have. Other extra arguments
    (positions, lengths, the window) are already reflected in the mask."""
    if others.get("output_attentions"):
        raise ValueError(
            f'attn_implementation="{NAME}" has no attention weights to return: they are never written out. '
            'For output_attentions=True, call model.set_attn_implementation("eager").'
        )
    if others.get("cache") is not None:
        raise ValueError(
            f'attn_implementation="{NAME}" does not read the paged cache of continuous batching; use '
            "attngraph.Engine for requests that come and go, or another attn_implementation."
        )
