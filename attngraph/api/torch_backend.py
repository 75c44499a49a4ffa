"""The backend for `torch.compile(model, backend="attngraph", options={...})`, and its errors.

torch.compile splits the model into graphs; each is compiled here as a separate model. A graph that was
compiled ahead of time (`aot_compile`) is saved as the graph that torch made, with the options: the
passes run again when it is first called.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from attngraph.api.compiled import CompiledModule
from attngraph.api.options import ABSORB, BACKENDS, make_options
from attngraph.capture.graph_breaks import PartialGraph
from attngraph.errors import SavedError, meant

try:
    from torch._dynamo.aot_compile_types import GraphModuleSerializableCallable as Graphs
    from torch._dynamo.aot_compile_types import SerializableCallable
except ImportError:  # a version of torch that has no form of graphs
    Graphs, SerializableCallable = None, object  # type: ignore[assignment, misc]

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
    return Part(module, _checked({**(options or {}), **kwargs}))


class Part(PartialGraph, SerializableCallable):
    """One of torch.compile's graphs as a callable, which torch can save if it was compiled ahead of time."""

    def __init__(self, module: fx.GraphModule, options: dict[str, Any]) -> None:
        self.options = options
        chosen = make_options(**options)
        super().__init__(module, functools.partial(CompiledModule, options=chosen, pieces=False))

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """The graph in torch's form, and the options; SavedError where these hold passes, or the installed
        torch has no form for graphs."""
        if Graphs is None or fn.options.get("passes"):
            raise SavedError("a graph with passes of your own, or of this version of torch, cannot be saved.")
        graph = fx.Graph()
        graph.output(graph.graph_copy(fn.module.graph, {}))
        saved = Graphs.serialize_compile_artifacts(Graphs(fx.GraphModule(fn.module, graph)))
        options = {name: str(v) if isinstance(v, Path) else v for name, v in fn.options.items()}
        return json.dumps([options, fn.kept]).encode() + b"\n" + saved

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> "Part":
        about, _, saved = data.partition(b"\n")
        options, kept = json.loads(about)
        made = cls(Graphs.deserialize_compile_artifacts(saved).graph_module, options)
        made.kept = kept
        return made


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """The validated options of the backend; an error names the invalid option and the valid ones."""
    accepted = "; ".join(f"{name}: {words}" for name, (_, words) in _OF_THE_BACKEND.items())
    ours = 'torch.compile(backend="attngraph")'
    for name, value in options.items():
        if name not in _OF_THE_BACKEND:
            advice = _ELSEWHERE.get(name) or meant(name, _OF_THE_BACKEND)
            raise TypeError(f"{ours} has no option {name!r}; {advice} Accepted are {accepted}.")
        types, words = _OF_THE_BACKEND[name]
        if not isinstance(value, types):
            raise TypeError(f"{ours}: option {name!r} must be {words}, found {value!r}.")
    return options


_ELSEWHERE = {
    "strict": "give fullgraph=True to torch.compile, or compile with attngraph.compile(model, strict=True).",
    "consistent": "call attngraph.compile(model, consistent=True): it needs the whole model.",
    "cache": "a decoder is derived by attngraph.compile(model, cache=True).",
    "mode": "a mode is Inductor's; options={'inductor': True} compiles the rest with Inductor.",
}
