"""Within one trace, the Python code of a graph is written when the graph is first called.

Torch writes and compiles it after each of its own rewrites, which takes long for many layers, and nothing
of a trace calls it. Used by `trace.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from attngraph.capture.instead import replaced

_write: Callable[[GraphModule], Any] = GraphModule.recompile


def code_written_when_called() -> contextlib.AbstractContextManager[Any]:
    """Let modules of graphs note that their code is to be written."""
    return replaced(GraphModule, "recompile", _note)


def _note(module: GraphModule) -> None:
    pytrees = getattr(module.graph._codegen, "pytree_info", None)
    if pytrees is not None:
        module._in_spec, module._out_spec = pytrees.in_spec, pytrees.out_spec
    type(module).forward = _written_first  # each module of a graph has a class of its own


def _written_first(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
    _write(module)
    return module(*args, **kwargs)
