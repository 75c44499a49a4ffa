"""`attn_implementation="attngraph"`: transformers' attention interface, computed by one fused op.

It computes the same as a model's own eager attention, without `attngraph.compile`: the arguments of the call
are expressed as a score program. While torch.export traces, the same is computed in plain PyTorch.

transformers' mask functions create a boolean for each query and key. Most masks are causal, with a window or
padding; given as a formula of the positions of query and key, kernels can skip the blocks that it hides. The
formula's values are compared with the mask itself, once for all layers; any other mask is read as a tensor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask

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
    changes = scale, softcap, position_bias, attention_mask, is_causal, sinks, dropout
    if torch.compiler.is_exporting():
        return _spelled_out(query, key, value, *changes).transpose(1, 2).contiguous(), None
    program, reads, sizes = _program(query, key, *changes)
    with torch.autocast(device, enabled=False):  # kernels choose the dtypes that they compute in
        out = torch.ops.attngraph.attention(query, key, value, reads, sizes, program)[0]
    return out.transpose(1, 2).contiguous(), None


def _program(
    query: Tensor, key: Tensor, scale: float, softcap: float | None, bias: Tensor | None, mask: Tensor | None,
    is_causal: bool, sinks: Tensor | None, dropout: float,
) -> tuple[str, list[Tensor], list[int]]:  # fmt: skip
    """The score program of a call, and the tensors and sizes that it reads."""
    reads: list[Tensor] = []
    sizes: list[int] = []
    lines = [f"s = {scale!r} * dot"]
    if softcap is not None:
        lines.append(f"s = {float(softcap)!r} * tanh(s / {float(softcap)!r})")
    if bias is not None:
        lines.append(f"s = s + {_read(reads, bias, key)}")
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
    elif is_causal:
        lines.append("keep k <= q")
    if sinks is not None:
        lines.append(f"sink {_read(reads, sinks, key)}")
    if dropout > 0:
        reads.append(torch.ops.attngraph.seed(query.device))
        kept = 1.0 - dropout
        lines.append(f"p = where(random(r{len(reads) - 1}[], b, h, q, k) < {kept!r}, p / {kept!r}, 0.0)")
    return "\n".join(lines), reads, sizes


def _spelled_out(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, bias: Tensor | None,
    mask: Tensor | None, is_causal: bool, sinks: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """The same in plain PyTorch, for torch.export: an exported program then contains no attngraph op, and
    `attngraph.compile` sees how masks are computed and fuses it like eager attention."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias[..., : key.shape[2]]
    if is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask[..., : key.shape[2]], scores, scores - torch.finfo(query.dtype).max)
    elif mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, query.dtype)).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return nn.functional.dropout(weights, dropout) @ value


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


# --- masks ---


class Formula(NamedTuple):
    """A mask `[B, 1, Sq, Skv]` as a predicate of a score program, in which `{}` stands for the padding tensor
    that it reads, if any, and n0 for `offset`. `version`: the mask's version counter when it was compared."""

    predicate: str
    padding: Tensor | None
    offset: int
    version: int


def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that transformers makes for "sdpa": True where a key is visible; None for a purely causal mask
    or if all keys are visible. Its formula is stored as an attribute."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is not None and not is_traced(mask):
        if mask.is_inference():  # inference tensors have no version counter that would show later changes
            with torch.inference_mode(False):
                mask = mask.clone()
        mask._attngraph_formula = _examined(mask, kwargs)  # type: ignore[attr-defined]
    return mask


def formula_of(mask: Tensor, queries: int, keys: int) -> Formula | None:
    """The formula of a mask from `make_mask`, if it has this many queries and keys and was not modified."""
    if is_traced(mask):
        return None
    found: Formula | None = getattr(mask, "_attngraph_formula", None)
    fits = found is not None and found.version == mask._version and mask.shape[-2:] == (queries, keys)
    return found if fits else None


def every_row_sees(mask: Tensor) -> bool:
    """Whether every query is known to see a key. Computed once per mask, which all layers share; False while
    a model is traced."""
    if is_traced(mask):
        return False
    if mask.is_inference():
        return bool(mask.any(-1).all())
    known: tuple[int, bool] | None = getattr(mask, "_attngraph_every_row_sees", None)
    if known is None or known[0] != mask._version:
        known = mask._version, bool(mask.any(-1).all())
        mask._attngraph_every_row_sees = known  # type: ignore[attr-defined]
    return known[1]


def is_traced(tensor: Tensor) -> bool:
    """Whether the tensor is being traced, so that its values cannot be read nor attributes stored on it."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting() or type(tensor) is not Tensor


def _examined(mask: Tensor, asked: dict[str, Any]) -> Formula | None:
    """The formula of `mask`, which transformers made from the arguments `asked`; None if none matches."""
    keys, queries = mask.shape[-1], mask.shape[-2]
    places = asked.get("q_offset"), asked.get("kv_offset", 0)
    if queries == 1 or not all(type(place) is int for place in places):
        return None  # a single query gains nothing; offsets given as tensors are not read
    offset, first = places[0] - places[1], places[1]
    padding = asked.get("attention_mask")
    if padding is not None:
        padding = padding[:, first : first + keys].bool()
        if padding.shape[1] != keys or bool(padding.all()):
            padding = None
    seen = torch.ones(1, keys, dtype=torch.bool, device=mask.device) if padding is None else padding
    q = torch.arange(queries, device=mask.device).unsqueeze(1) + offset
    k = torch.arange(keys, device=mask.device)
    window, here = asked.get("local_size"), "q + n0" if offset else "q"
    parts: list[str] = []
    predicted = seen.view(-1, 1, 1, keys)
    if not torch.equal(mask[:, 0, 0], seen.expand(len(mask), keys)):  # the first query does not see all
        parts.append(f"k <= {here}")
        predicted = predicted & (k <= q)
        if window is not None:
            parts.append(f"k > {here} - {window}")
            predicted = predicted & (k > q - window)
    if padding is not None:
        parts.append("{}[b, k]")
    different = mask[:1] if mask.stride(0) == 0 and len(predicted) == 1 else mask
    if not parts or not torch.equal(different, predicted.expand_as(different)):
        return None
    return Formula(" and ".join(parts), padding, offset, mask._version)
