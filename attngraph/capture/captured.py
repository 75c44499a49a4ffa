"""The result of a trace: a program graph, the structure of its results, and the sizes it is valid for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from attngraph.capture.structure import TreeSpec
from attngraph.ir.graph.program_graph import ProgramGraph


@dataclasses.dataclass(frozen=True)
class Structure:
    """The structure of a call's results: the tree, and for each leaf either the position of a tensor among
    the graph's values, a size to be computed, or a fixed value."""

    tree: TreeSpec
    leaves: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Captured:
    """A program graph, the structure of its results, and the argument shapes.

    `shapes` has the shape (numbers and sympy expressions) of each tensor argument.
    """

    graph: ProgramGraph
    structure: Structure
    shapes: tuple[tuple[Any, ...], ...]

    def dimensions(self, sizes: Iterable[str]) -> frozenset[tuple[int, int]]:
        """The dimensions, (argument, dimension), whose extents involve these symbolic sizes."""
        names = set(sizes)
        return frozenset(
            (argument, dim)
            for argument, shape in enumerate(self.shapes)
            for dim, extent in enumerate(shape)
            if names & {str(s) for s in getattr(extent, "free_symbols", ())}
        )
