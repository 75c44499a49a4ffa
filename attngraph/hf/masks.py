"""Expresses masks as formulas where possible.

transformers' mask functions create a boolean for each query and key. Most masks are causal, with a window or
padding; given as a formula of the positions of query and key, kernels can skip the blocks that it hides. The
formula's values are compared with the mask itself, once for all layers; any other mask is read as a tensor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask


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
