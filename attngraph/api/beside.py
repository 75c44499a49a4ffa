"""A result of forward that a draft is given, beside the logits: it stands behind them in one tensor.

So a decoder's step has one result for each token, which is derived and compared as logits are.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attngraph.api.build import place_of_logits
from attngraph.capture.captured import Captured
from attngraph.capture.structure import unflatten
from attngraph.errors import NoDecoderError
from attngraph.ir.graph import ProgramGraph
from attngraph.passes.build import Builder


def join_beside(captured: Captured, name: str) -> None:
    """Put the result of this name behind the logits, in their place. Raises NoDecoderError: there is none
    with an entry for each token."""
    graph, place = captured.graph, place_of_logits(captured.structure)
    results = graph.results()
    logits, other = results[place], results[_place(captured, name)]
    shapes = [tuple(n.meta["val"].shape) for n in (logits, other)]
    inner = shapes[1][2:]
    alike = shapes[0][:2] == shapes[1][:2] and len(shapes[0]) == 3
    if not alike or not inner or not all(isinstance(n, int) for n in inner):
        raise NoDecoderError(
            f"its result {name} is {list(shapes[1])}, beside logits {list(shapes[0])}: what a draft is given "
            "has an entry for each token, [B, T, ...]."
        )

    def joined(logits: Tensor, other: Tensor) -> Tensor:
        return torch.cat([logits, other.reshape(*other.shape[:2], math.prod(inner))], -1)

    build = Builder(graph, graph.graph.output_node())
    results[place] = build.trace(joined, logits, other)
    graph.graph.output_node().args = (tuple(results),)


def width_beside(graph: ProgramGraph, place: int) -> int:
    """How many numbers of a joined result, the one of this number, stand behind the logits."""
    _, other = graph.results()[place].args[0]
    return int(other.meta["val"].shape[-1])


def _place(captured: Captured, name: str) -> int:
    """The number of a result of this name among the tensors."""
    structure = captured.structure
    leaves = [value if kind == "tensor" else None for kind, value in structure.leaves]
    result: Any = unflatten(leaves, structure.tree)
    found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    if found is None and name.isdecimal() and isinstance(result, (tuple, list)) and int(name) < len(result):
        found = result[int(name)]
    if isinstance(found, (tuple, list)):
        found = found[-1] if found else None
    if type(found) is not int:
        raise NoDecoderError(f"forward returns no {name} for a draft.")
    return found
