"""Operations of torch whose operands are functions (torch.cond, FlexAttention), as a trace meets them.

A graph holds plain operations. So a trace runs the functions themselves wherever the operation says no more
than that: a wrapper around a function, a branch that follows from sizes, one function for every row (which
torch.vmap is, too), and FlexAttention, which is written out as PyTorch's own eager kernel computes it: its
score function and its mask function are called once, on all pairs, by torch.vmap, and what they compute is
recognised by its meaning as any other mask or score is. Every other operation is refused by its name and the
user's line; torch.compile then captures what is around it.
"""

import contextlib
import functools
import math
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from attngraph.capture.instead import Row, instead, replaced
from attngraph.capture.lines import TORCH, line_at, outside
from attngraph.errors import CaptureError
from attngraph.ir.graph.source import line_of, source_of
from attngraph.ir.kept import holding

aten: Any = torch.ops.aten
HigherOrderOperator = torch._ops.HigherOrderOperator
_OPS, _UTILS = "torch._higher_order_ops", "torch._higher_order_ops.utils"
_FLEX, _INDEX = "torch.nn.attention.flex_attention", "torch._dynamo._trace_wrapped_higher_order_op"
_WRAPPER = "attngraph.capture.flat"
_FILE = os.path.join(*_FLEX.split(".")) + ".py"


def _run(function: Callable[..., Any], *operands: Any) -> Any:
    """A graph is interpreted, so that its operations keep the lines of the user's code."""
    return (fx.Interpreter(function).run if isinstance(function, fx.GraphModule) else function)(*operands)


def _for_every_row(
    function: Callable[..., Any], rows: Any, others: Any, mutated_arg_indices: str = ""
) -> Any:
    one = functools.partial(_run, function)
    return torch.vmap(one, in_dims=(*(0 for _ in rows), *(None for _ in others)))(*rows, *others)


_WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "flex_attention": lambda *operands, **named: _flex_attention(*operands, **named),
    "invoke_subgraph": lambda function, name, *operands: _run(function, *operands),
    "tag_activation_checkpoint": lambda graph, *operands, **options: _run(graph, *operands),
    "map_impl": _for_every_row,
}
"""What an operation does with its functions, in plain operations."""
_CALLS = (
    "wrap", "wrap_activation_checkpoint", "dynamo_bypassing_wrapper", "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
)  # fmt: skip
"""Operations that call a function by themselves when they are called in a trace."""


@contextlib.contextmanager
def functions_run() -> Iterator[set[str]]:
    """Let a trace run the functions that are operands of operations, instead of recording graphs of them.
    Yields the names of the operations that are written out in the body.

    Raises:
        CaptureError: in the body, where an operation does more with its functions than a graph can say.
    """
    call: Any = HigherOrderOperator.__call__
    written, tracing = set[str](), threading.get_ident()

    def met(op: HigherOrderOperator, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracing:
            return call(op, *args, **kwargs)
        if op.__name__ in _WRITTEN_OUT:
            written.add(op.__name__)
            return _WRITTEN_OUT[op.__name__](*args, **kwargs)
        if op.__name__ == "cond" and not isinstance(args[0], Tensor):  # sizes decide
            return (args[1] if args[0] else args[2])(*args[3])
        traces, frame = fx.traceback.get_current_meta().get("stack_trace"), sys._getframe(1)
        passed = (TORCH, "<", __file__)
        if traces:  # a graph is interpreted
            raise _refusal(op, line_of(traces))
        raise _refusal(op, line_at(outside(frame, lambda f: f.f_code.co_filename.startswith(passed))))

    with (
        replaced(HigherOrderOperator, "__call__", met),
        # torch would have torch.compile look at the functions first, outside of the trace's modes.
        replaced(_UTILS, "_in_hop_compile", lambda: False),
        replaced(
            "torch.fx.experimental.proxy_tensor", "_temp_remove_pre_dispatch_torch_function_mode",
            contextlib.nullcontext,
        ),
        replaced(f"{_OPS}.invoke_subgraph", "invoke_subgraph_placeholder", operator.call),
        _flex_followed(),
    ):  # fmt: skip
        yield written


def function_refusal(node: fx.Node, traced: bool = False) -> CaptureError | None:
    """Why no graph can have a node: its operation does more with functions than a trace can write out. None
    for every other node. `traced`: the node is a trace's own, in which no such operation may be left."""
    op: Any = node.target
    if not isinstance(op, HigherOrderOperator) or (not traced and op.__name__ in (*_WRITTEN_OUT, *_CALLS)):
        return None
    return _refusal(op, source_of(node))


def _refusal(op: HigherOrderOperator, line: str) -> CaptureError:
    reason = f"{op.__name__} is a higher-order operation of torch, and a graph has plain ones alone"
    return CaptureError(
        f"cannot capture the model{f' at {line}' if line else ''}: {reason}.\n"
        "What to do: write it in plain operations, or compile without strict=True, which captures what is "
        "before and after it.",
        reason,
        line,
    )


# --- FlexAttention ---

_MADE: ContextVar[list[Any]] = ContextVar("_MADE")


@contextlib.contextmanager
def _flex_followed() -> Iterator[None]:
    """Let FlexAttention have gradients on a CPU too: the written-out one has. Note the block masks that are
    made in the body from their functions."""

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            _MADE.get().append(make(*args, **kwargs))
            return _MADE.get()[-1]

        return made

    rows: tuple[Row, ...] = (
        (_FLEX, "_create_sparse_block_from_block_mask", noting),
        (_FLEX, "_create_empty_block_mask", noting),
        (_FLEX, "_validate_device", lambda _: lambda *_: None),
        (_FLEX, "_convert_mask_to_block_mask", lambda _: _blocks),
        (_INDEX, "TransformGetItemToIndex", lambda _: _Indexed),
    )
    with holding(_MADE, []), instead(*rows):
        yield


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


def _flex_attention(
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
        narrow, others = torch.get_autocast_dtype(kind), (kernel_options, score_others, mask_others)
        query, key, value = (torch.amp.autocast_mode._cast(t, kind, narrow) for t in (query, key, value))
        with torch.autocast(kind, enabled=False):
            return _flex_attention(query, key, value, score_mod, block_mask, scale, *others)
    scores = _scores(query, key, score_mod, block_mask, scale, score_others, mask_others)
    groups = query.shape[1] // value.shape[1]
    values = torch.repeat_interleave(value, groups, dim=1).to(query.dtype)
    out = torch._safe_softmax(scores, dim=-1).to(query.dtype) @ values.expand(query.shape[0], -1, -1, -1)
    unseen = (scores == -math.inf).all(-1)
    total = scores.logsumexp(-1).masked_fill(unseen, -math.inf)
    unit = 1.0 if kernel_options.get("BACKEND") == "FLASH" else math.log(2)
    # The dimensions of the output lie in memory in the order of the query's.
    strides = [s if isinstance(s, int) else s.node.hint for s in query.stride()]
    order = sorted(range(3), key=strides.__getitem__)[::-1]
    laid_out = out.permute(*order, 3).contiguous().permute(*(order.index(d) for d in range(3)), 3)
    return laid_out, total / unit, scores.detach().amax(-1) / unit


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

    def is_inside(frame: types.FrameType) -> bool:
        return frame.f_code.co_name != "flex_attention" or not frame.f_code.co_filename.endswith(_FILE)

    def compiles(frame: types.FrameType) -> bool:
        return isinstance(frame.f_locals.get("self"), torch._dynamo.eval_frame.OptimizeContext)

    called = outside(sys._getframe(), is_inside)
    found = outside(called, lambda f: not compiles(f) and f.f_globals.get("__name__") != _WRAPPER)
    return found is not None and compiles(found)
