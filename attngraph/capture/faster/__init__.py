"""What only makes torch.export faster: without this folder the same graphs come from slower traces.

`trace.py` hooks it in at three places, and nothing else imports it: around all of a capture, around the
export, and around the target's own code in it. Operations on operands of equal sizes are inferred once
(`calls.py`), formulas of equal sizes are computed once (`formulas.py`), and equal calls of torch's functions
are traced twice and repeated after that (`functions.py`). Here are the steps of torch.export
that are skipped where there is nothing to be found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree

from attngraph.capture.faster.calls import equal_calls_inferred_once
from attngraph.capture.faster.formulas import equal_formulas_computed_once
from attngraph.capture.faster.functions import equal_functions_traced_twice
from attngraph.capture.instead import instead, replaced

forward = equal_functions_traced_twice
_write: Callable[[GraphModule], Any] = GraphModule.recompile


def whole_capture() -> contextlib.AbstractContextManager[None]:
    """Let the Python code of a graph be written when the graph is first called. Torch writes and compiles it
    after each of its own rewrites, which takes long for many layers, and nothing of a trace calls it."""
    return replaced(GraphModule, "recompile", _note)


@contextlib.contextmanager
def export() -> Iterator[None]:
    """Shorten what torch.export does in the body. With symbolic sizes its cache of results without data
    takes longer than computing them again. After a trace it takes the wrapper's name off the modules of each
    node, by a function for trees of any kind, and looks for sizes that follow from values in each result,
    also where the trace has none."""
    with (
        equal_calls_inferred_once(),
        equal_formulas_computed_once(),
        replaced(torch._dynamo.config, "fake_tensor_cache_enabled", False),
        replaced("torch.export._trace", "pytree", _Trees()),
        instead((symbolic_shapes, "_free_unbacked_symbols_with_path", _looking_where_some_are)),
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


def _looking_where_some_are(look: Callable[..., Any]) -> Callable[..., Any]:
    def looked(*args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("pending")
        return {} if wanted is not None and not wanted else look(*args, **kwargs)

    return looked


class _Trees:
    """Torch's functions for trees, with a shorter one for tables of pairs of names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_pytree, name)

    @staticmethod
    def tree_map(function: Any, tree: Any, *others: Any, **options: Any) -> Any:
        if type(tree) is dict and not others and not options and all(map(_is_pair, tree.values())):
            return {key: (function(one), function(other)) for key, (one, other) in tree.items()}
        return _pytree.tree_map(function, tree, *others, **options)


def _is_pair(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and type(value[0]) is str and type(value[1]) is str
