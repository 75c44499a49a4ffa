"""Operations of torch whose operands are functions (torch.cond, FlexAttention), as a trace meets them.

A graph holds plain operations. So a trace runs the functions themselves wherever the operation says no more
than that: a wrapper around a function, a branch that follows from sizes, one function for every row (which
torch.vmap is, too), and FlexAttention, which is written out in `flex.py`. Every other one is refused by its
name and the user's line; torch.compile then captures what is around it. Used by `flat.py` and `trace.py`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.capture import flex
from attngraph.capture.instead import replaced
from attngraph.errors import CaptureError
from attngraph.ir.graph.source import line_of, short_path, source_of

HigherOrderOperator = torch._ops.HigherOrderOperator
_OPS, _UTILS = "torch._higher_order_ops", "torch._higher_order_ops.utils"


def _run(function: Callable[..., Any], *operands: Any) -> Any:
    """A graph is interpreted, so that its operations keep the lines of the user's code."""
    return (fx.Interpreter(function).run if isinstance(function, fx.GraphModule) else function)(*operands)


def _for_every_row(
    function: Callable[..., Any], rows: Any, others: Any, mutated_arg_indices: str = ""
) -> Any:  # fmt: skip
    one = functools.partial(_run, function)
    return torch.vmap(one, in_dims=(*(0 for _ in rows), *(None for _ in others)))(*rows, *others)


_WRITTEN_OUT: dict[str, Callable[..., Any]] = {
    "flex_attention": flex.attention,
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
        raise _refusal(op, _line(sys._getframe(1)))

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


def _line(frame: Any) -> str:
    """The user's line, also where a graph is interpreted."""
    traces = fx.traceback.get_current_meta().get("stack_trace")
    if traces:
        return line_of(traces)
    while frame is not None and frame.f_code.co_filename.startswith((torch.__path__[0], "<", __file__)):
        frame = frame.f_back
    return "" if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
