"""What only makes torch.export faster: without this folder the same graphs come from slower traces.

`trace.py` hooks it in, and nothing else imports it: around all of a capture, around the export, around the
target's own code in it, and where writes are taken out of the program. Operations on operands of equal sizes
are inferred once, formulas of equal sizes are computed once (`calls.py`), equal calls of torch's functions
are traced twice and repeated after that (`functions.py`), and writes are replaced on the graph (`writes.py`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from attngraph.capture.faster.calls import equal_calls_inferred_once, equal_formulas_computed_once
from attngraph.capture.faster.functions import equal_functions_traced_twice as forward
from attngraph.capture.faster.writes import functional
from attngraph.capture.instead import replaced

__all__ = ["export", "forward", "functional", "whole_capture"]
_write: Callable[[GraphModule], Any] = GraphModule.recompile


def whole_capture() -> contextlib.AbstractContextManager[None]:
    """Let the Python code of a graph be written when the graph is first called. Torch writes and compiles it
    after each of its own rewrites, which takes long for many layers, and nothing of a trace calls it."""
    return replaced(GraphModule, "recompile", _note)


@contextlib.contextmanager
def export() -> Iterator[None]:
    """Shorten what torch.export does in the body. With symbolic sizes its cache of results without data
    takes longer than computing them again."""
    with (
        equal_calls_inferred_once(),
        equal_formulas_computed_once(),
        replaced(torch._dynamo.config, "fake_tensor_cache_enabled", False),
    ):
        yield


def _note(module: GraphModule) -> None:
    """Note that the module's code is to be written."""
    pytrees = getattr(module.graph._codegen, "pytree_info", None)
    if pytrees is not None:
        module._in_spec, module._out_spec = pytrees.in_spec, pytrees.out_spec
    type(module).forward = _written_first  # each module of a graph has a class of its own


def _written_first(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
    _write(module)
    return module(*args, **kwargs)
