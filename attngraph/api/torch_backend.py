"""The backend for `torch.compile(model, backend="attngraph", options={...})`, and its errors.

torch.compile splits the model into graphs; each is compiled here as a separate model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from attngraph.api.compiled import CompiledModule
from attngraph.api.options import ABSORB, BACKENDS, make_options
from attngraph.capture.graph_breaks import PartialGraph
from attngraph.errors import meant

_OF_THE_BACKEND: dict[str, tuple[tuple[type, ...], str]] = {
    "backend": ((str,), f"one of {', '.join(BACKENDS)}"),
    "inductor": ((bool,), "True or False"),
    "dump": ((str, Path, type(None)), "a directory"),
    "passes": ((list, tuple, type(None)), "a list of passes"),
    "absorb": ((str,), f"one of {', '.join(ABSORB)}"),
    "disable": ((list, tuple), "a list of names of passes"),
    "min_scores": ((int, type(None)), "a number of scores"),
}
"""The options of `torch.compile(model, backend="attngraph", options={...})`: types, and a description."""


def dynamo_backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """The backend function for `torch.compile(model, backend="attngraph")`.

    Args:
        options: the keyword arguments of `attngraph.compile`, except `strict` and `cache`.

    Raises:
        TypeError, ValueError: an unknown option, or an invalid value.
    """
    chosen = make_options(**_checked({**(options or {}), **kwargs}))
    return PartialGraph(module, functools.partial(CompiledModule, options=chosen, pieces=False))


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """The validated options of the backend; an error names the invalid option and the valid ones."""
    accepted = "; ".join(f"{name}: {words}" for name, (_, words) in _OF_THE_BACKEND.items())
    for name, value in options.items():
        if name not in _OF_THE_BACKEND:
            advice = _ELSEWHERE.get(name) or meant(name, _OF_THE_BACKEND)
            raise TypeError(
                f'torch.compile(backend="attngraph") has no option {name!r}; {advice} '
                f"Accepted are {accepted}."
            )
        types, words = _OF_THE_BACKEND[name]
        if not isinstance(value, types):
            raise TypeError(
                f'torch.compile(backend="attngraph"): option {name!r} must be {words}, found {value!r}.'
            )
    return options


_ELSEWHERE = {
    "strict": "give fullgraph=True to torch.compile, or compile with attngraph.compile(model, strict=True).",
    "cache": "a decoder is derived by attngraph.compile(model, cache=True).",
    "mode": "a mode is Inductor's; options={'inductor': True} compiles the rest with Inductor.",
}
