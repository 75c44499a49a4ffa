"""Operations of torch whose operands are functions (torch.cond, FlexAttention), as a trace meets them.

A graph holds plain operations. So a trace runs the functions themselves wherever the operation says no more
than that: a wrapper around a function, a branch that follows from sizes, one function for every row (which
torch.vmap is, too), and FlexAttention, which is written out in `flex.py`. Every other one is refused by its
name and the user's line; torch.compile then captures what is around it. Used by `flat.py` and `trace.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.capture import flex
from attngraph.capture.replaced import replaced
from attngraph.errors import CaptureError
from attngraph.ir.graph.source import short_path, source_of

HigherOrderOperator = torch._ops.HigherOrderOperator
_OPS, _UTILS = "torch._higher_order_ops", "torch._higher_order_ops.utils"


def _for_every_row(
    function: Callable[..., Any], rows: Any, others: Any, mutated_arg_indices: str = ""
) -> Any:  # fmt: skip
    return torch.vmap(function, in_dims=(*(0 for _ in rows), *(None for _ in others)))(*rows, *others)


_WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "flex_attention": flex.attention,
    "invoke_subgraph": lambda function, name, *operands: function(*operands),
    "map_impl": _for_every_row,
}
"""What an operation does with its functions, in plain operations."""
_CALLS = (
    "wrap", "wrap_activation_checkpoint", "tag_activation_checkpoint", "dynamo_bypassing_wrapper",
    "wrap_with_autocast", "wrap_with_set_grad_enabled",
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
    written = set[str]()

    def met(op: HigherOrderOperator, /, *args: Any, **kwargs: Any) -> Any:
        if op.__name__ in _WRITTEN_OUT:
            written.add(op.__name__)
            return _WRITTEN_OUT[op.__name__](*args, **kwargs)
        if op.__name__ == "cond" and not isinstance(args[0], Tensor):  # sizes decide
            return (args[1] if args[0] else args[2])(*args[3])
        if any(callable(a) for a in args):
            raise _refusal(op, _line(sys._getframe(1)))
        return call(op, *args, **kwargs)

    with (
        replaced(HigherOrderOperator, "__call__", met),
        # torch would have torch.compile look at the functions first, outside of the trace's modes.
        replaced(_UTILS, "_in_hop_compile", lambda: False),
        replaced(
            "torch.fx.experimental.proxy_tensor", "_temp_remove_pre_dispatch_torch_function_mode",
            contextlib.nullcontext,
        ),
        replaced(f"{_OPS}.invoke_subgraph", "invoke_subgraph_placeholder", _called),
        flex.functions_followed(),
    ):  # fmt: skip
        yield written


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def function_refusal(node: fx.Node) -> CaptureError | None:
    """Why a trace of a graph cannot go through a node: an operation whose operands are graphs, which does
    more with them than a trace can write out; None for every other node."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.__name__ in (*_WRITTEN_OUT, *_CALLS):
        return None
    has_graphs = any(n.op == "get_attr" for n in node.all_input_nodes)
    return _refusal(node.target, source_of(node)) if has_graphs else None


def _refusal(op: HigherOrderOperator, line: str) -> CaptureError:
    reason = f"the operation {op.__name__} runs functions, and a graph has plain operations alone"
    return CaptureError(
        f"cannot capture the model{f' at {line}' if line else ''}: {reason}.\n"
        "What to do: write it in plain operations, or compile without strict=True, which captures what is "
        "before and after it.",
        reason,
        line,
    )


def _line(frame: Any) -> str:
    """The user's line."""
    torchs = torch.__path__[0]
    while frame is not None and frame.f_code.co_filename.startswith((torchs, "<", __file__)):
        frame = frame.f_back
    return "" if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
