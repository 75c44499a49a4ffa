"""Steps of torch.export that look into every node of a trace, shortened where there is nothing to be
found.

After a trace torch takes the wrapper's name off the modules of each node, by a function for trees of any
kind, and looks for sizes that follow from values in each result, also where the trace has none. Used by
`trace.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree

from attngraph.capture.instead import replaced


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


@contextlib.contextmanager
def steps_shortened() -> Iterator[None]:
    """Shorten these steps."""
    look: Any = getattr(symbolic_shapes, "_free_unbacked_symbols_with_path", None)

    def looked(*args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("pending")
        return {} if wanted is not None and not wanted else look(*args, **kwargs)

    with (
        replaced(symbolic_shapes, "_free_unbacked_symbols_with_path", looked),
        replaced("torch.export._trace", "pytree", _Trees()),
    ):
        yield
