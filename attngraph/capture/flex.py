"""FlexAttention in plain operations, as PyTorch's own eager kernel computes it.

A score function and a mask function are called once, on all pairs, by torch.vmap. What they compute is part
of the graph then, and is recognised by its meaning as any other mask or score is: the model is fused, trained
and decoded as one that writes them by hand. Used by `subgraphs.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attngraph.capture.instead import replaced

aten: Any = torch.ops.aten
_FLEX, _INDEX = "torch.nn.attention.flex_attention", "torch._dynamo._trace_wrapped_higher_order_op"
_WRAPPER = "attngraph.capture.flat"
_FILE = os.path.join(*_FLEX.split(".")) + ".py"


_MADE: ContextVar[list[Any]] = ContextVar("_MADE")


@contextlib.contextmanager
def functions_followed() -> Iterator[None]:
    """Let FlexAttention have gradients on a CPU too: the written-out one has. Note the block masks that are
    made in the body from their functions."""
    torchs: Any = importlib.import_module(_FLEX)

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            _MADE.get().append(make(*args, **kwargs))
            return _MADE.get()[-1]

        return made

    token = _MADE.set([])
    try:
        with contextlib.ExitStack() as stack:
            for name in ("_create_sparse_block_from_block_mask", "_create_empty_block_mask"):
                stack.enter_context(replaced(torchs, name, noting(getattr(torchs, name))))
            stack.enter_context(replaced(torchs, "_validate_device", lambda *_: None))
            stack.enter_context(replaced(torchs, "_convert_mask_to_block_mask", _blocks))
            stack.enter_context(replaced(_INDEX, "TransformGetItemToIndex", _Indexed))
            yield
    finally:
        _MADE.reset(token)


def _blocks(
    mask: Any, Q_BLOCK_SIZE: int = 128, KV_BLOCK_SIZE: int = 128, separate_full_blocks: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The blocks of a mask, [B, H, Sq, Skv], of which some pairs are seen, and those of which all are.
    (Torch's own function divides sizes that a trace does not follow then: a graph for each number of blocks.)
    """
    mask = mask[(None,) * (4 - mask.ndim)]
    rows, columns = -(-mask.shape[2] // Q_BLOCK_SIZE), -(-mask.shape[3] // KV_BLOCK_SIZE)
    right, below = columns * KV_BLOCK_SIZE - mask.shape[3], rows * Q_BLOCK_SIZE - mask.shape[2]
    padded: Any = torch.nn.functional.pad(mask, (0, right, 0, below))
    parts = padded.unflatten(3, (columns, KV_BLOCK_SIZE))
    numbers = parts.unflatten(2, (rows, Q_BLOCK_SIZE)).sum((3, 5))
    if not separate_full_blocks:
        return (numbers > 0).to(torch.int8), None
    full = numbers == Q_BLOCK_SIZE * KV_BLOCK_SIZE
    return ((numbers > 0) & ~full).to(torch.int8), full.to(torch.int8)


class _Indexed(TorchFunctionMode):
    """`tensor[q, 3]` as plain operations, where q has no dimensions; torch would ask for its number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        found, given = args
        places = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(place, (Tensor, int)) for place in places):
            return func(*args)
        for dim in reversed(range(len(places))):
            if isinstance(places[dim], int):
                found = found.select(dim, places[dim])
        tensors = [place for place in places if isinstance(place, Tensor)]
        if len(tensors) < found.ndim and tensors and not any(place.ndim for place in tensors):
            # torch infers a wrong layout for these
            return aten.index.Tensor(found, [place.reshape(1) for place in tensors]).squeeze(0)
        return aten.index.Tensor(found, tensors) if tensors else found


def attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], block_mask: tuple[Any, ...],
    scale: float, kernel_options: dict[str, Any], score_others: tuple[Any, ...] = (),
    mask_others: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, the log-sum-exp of the scores and their largest, of each query.

    Shapes: query [B, Hq, Sq, D], key [B or 1, Hkv, Skv, D], value [B or 1, Hkv, Skv, Dv]. The output,
    [B, Hq, Sq, Dv], lies in memory as the query does.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        query, key, value = (torch.amp.autocast_mode._cast(t, kind, narrow) for t in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return attention(
                query, key, value, score_mod, block_mask, scale, kernel_options, score_others, mask_others
            )
    scores = _scores(query, key, score_mod, block_mask, scale, score_others, mask_others)
    groups = query.shape[1] // value.shape[1]
    values = torch.repeat_interleave(value, groups, dim=1).to(query.dtype)
    out = torch._safe_softmax(scores, dim=-1).to(query.dtype) @ values.expand(query.shape[0], -1, -1, -1)
    unseen = (scores == -math.inf).all(-1)
    total = scores.logsumexp(-1).masked_fill(unseen, -math.inf)
    unit = 1.0 if kernel_options.get("BACKEND") == "FLASH" else math.log(2)
    return _laid_out(out, query), total / unit, scores.detach().amax(-1) / unit


def _scores(
    query: Tensor, key: Tensor, score_mod: Callable[..., Tensor], block_mask: tuple[Any, ...], scale: float,
    score_others: tuple[Any, ...], mask_others: tuple[Any, ...],
) -> Tensor:  # fmt: skip
    """The scores of all pairs, [B, Hq, Sq, Skv], with minus infinity where a pair is hidden."""
    from torch.nn.attention.flex_attention import _identity, _vmap_for_bhqkv

    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys = torch.repeat_interleave(key, query.shape[1] // key.shape[1], dim=1)
    scores = query.to(wide) @ keys.expand(query.shape[0], -1, -1, -1).to(wide).transpose(-2, -1)
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    changed: Any = _vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(score_others))
    is_seen = _vmap_for_bhqkv(block_mask[-1], prefix=(), suffix=(None,) * len(mask_others))
    with _Indexed():
        found = scores * scale
        if score_mod is not _identity:
            found = changed(found, *places, *score_others)
        seen = is_seen(*places, *mask_others)
    return torch.where(_with_lists(seen, block_mask), found, -math.inf)


def _with_lists(seen: Tensor, block_mask: tuple[Any, ...]) -> Tensor:
    """The pairs that a call sees: compiled, FlexAttention skips the blocks that are on none of its mask's two
    lists, and asks the mask's function in blocks of the first alone. (Where the mask was made from its
    function, that is the function; where nothing is compiled, torch looks at no list.)"""
    rows, columns, function = block_mask[-3:]
    tensors = next(n for n, each in enumerate(block_mask) if isinstance(each, Tensor))
    numbers, places, full_numbers, full_places = block_mask[tensors : tensors + 4]
    if not _is_compiled() or any(m.kv_indices is places and m.mask_mod is function for m in _MADE.get()):
        return seen
    found = _listed(seen, numbers, places, rows, columns) & seen
    if full_numbers is None:
        return found
    return found | _listed(seen, full_numbers, full_places, rows, columns)


def _listed(seen: Tensor, numbers: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
    """Whether a pair is in a listed block, of `rows` queries and `columns` keys.

    Shapes: numbers [B or 1, Hq or 1, blocks], places [B or 1, Hq or 1, blocks, most]; as scores are, or 1.
    """
    queries, keys = (torch.arange(size, device=seen.device) for size in seen.shape[-2:])
    counts = torch.arange(places.shape[-1], device=seen.device) < numbers[..., None]
    blocks = (keys // columns)[:, None]
    return ((places[:, :, queries // rows, None] == blocks) & counts[:, :, queries // rows, None]).any(-1)


def _is_compiled() -> bool:
    """Whether the model calls FlexAttention inside of torch.compile, which a trace leaves out."""
    frame: Any = sys._getframe()
    while frame.f_code.co_name != "flex_attention" or not frame.f_code.co_filename.endswith(_FILE):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") != _WRAPPER:
        if isinstance(frame.f_locals.get("self"), torch._dynamo.eval_frame.OptimizeContext):
            return True
        frame = frame.f_back
    return False


def _laid_out(out: Tensor, query: Tensor) -> Tensor:
    """The output with its dimensions in memory in the order of the query's."""
    strides = [s if isinstance(s, int) else s.node.hint for s in query.stride()]
    order = sorted(range(3), key=strides.__getitem__)[::-1]
    return out.permute(*order, 3).contiguous().permute(*(order.index(d) for d in range(3)), 3)
