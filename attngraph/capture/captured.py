"""What a trace takes for granted about its call, as one value, and what it gives: a program graph, the
structure of its results, and the sizes it is valid for.

`capture` is given an `Assumed`, and a trace that fails may say what else to take for granted: the next one
assumes `assumed.after(problem)`, until this is None. Whoever derives a graph from a call of its own choosing
makes the value (`Assumed(tokens=11)`), hands it down whole, and asks it where a later step depends on it.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from attngraph.capture.attributes import Path, Settings
from attngraph.capture.sides import UNASKED, Sides
from attngraph.capture.state.scope import EVERYTHING, Scope
from attngraph.capture.structure import TreeSpec, attributes_of, unflatten
from attngraph.errors import CaptureError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.report.entries import Break

Dimension = tuple[int, int]
"""The number of a tensor among a call's arguments, and one of its dimensions."""


def dimensions(shapes: Sequence[Sequence[Any]], sizes: Set[str] | None) -> frozenset[Dimension]:
    """The dimensions whose extents involve these symbolic sizes; for None all that are symbols of torch's."""
    found: set[Dimension] = set()
    for place, shape in enumerate(shapes):
        for dim, extent in enumerate(shape):
            formula = extent.node.expr if isinstance(extent, torch.SymInt) else extent
            own = {str(symbol) for symbol in getattr(formula, "free_symbols", ())}
            if own & sizes if sizes is not None else isinstance(extent, torch.SymInt):
                found.add((place, dim))
    return frozenset(found)


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What a graph may take for granted.

    Attributes:
        fixed: dimensions that are numbers in it. All others are symbolic where torch can follow them.
        symbolic: dimensions that must be symbolic: a graph for one number of them is of no use.
        settings: attributes that each call sets, which are results of the graph, and to what.
        reads: whether a call may read these before it sets them. (Such a graph cannot serve calls.)
        tokens: the number of the tokens, where the graph is for it alone; it is a size of nothing else.
        multiples: of that number, with which operations computed in a trace for another one.
        rows_alone: whether the model is called with one sequence at a time, and the graph is a batch of such
            calls. The call has one tensor.
        one_row: a dimension that is 1 in every call of the graph, though it is a symbol in it: questions
            about it are answered so. (Whether the model does that with one, whoever asks has to show.)
        equal: dimensions that are as long as each other in every call of the graph.
    """

    fixed: frozenset[Dimension] = frozenset()
    symbolic: frozenset[Dimension] = frozenset()
    settings: Settings = dataclasses.field(default_factory=dict)
    reads: bool = False
    tokens: int = 0
    multiples: frozenset[int] = frozenset()
    rows_alone: bool = False
    one_row: Dimension | None = None
    equal: frozenset[frozenset[Dimension]] = frozenset()

    def with_numbers(self, dimensions: frozenset[Dimension]) -> "Assumed":
        """The same with numbers for these dimensions too."""
        return dataclasses.replace(self, fixed=self.fixed | dimensions)

    def after(self, problem: CaptureError) -> "Assumed | None":
        """What the next trace takes for granted, if this one failed so: attributes that are set become
        results, then sizes that torch cannot follow numbers. None: nothing else would help."""
        if problem.settings and not self.settings:
            return dataclasses.replace(self, settings=problem.settings)
        return self.with_numbers(problem.dimensions) if problem.dimensions - self.fixed else None


NOTHING = Assumed()
"""What a trace takes for granted unless told: nothing."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """The structure of a call's results: the tree, and for each leaf either the position of a tensor among
    the graph's values, that of an argument which is written to, the place of an object among the arguments, a
    size to be computed, or a fixed value."""

    tree: TreeSpec
    leaves: tuple[tuple[str, Any], ...]

    def names(self, root: str) -> dict[int, str]:
        """The name of each tensor, by its number, as code that has the result writes it: `result[1]`,
        `result.attentions[0]`."""
        marks = {number: torch.empty(0) for kind, number in self.leaves if kind == "tensor"}
        leaves = [marks[value] if kind == "tensor" else None for kind, value in self.leaves]
        found = {id(mark): name for name, mark in _named(unflatten(leaves, self.tree), root)}
        return {number: found.get(id(mark), root) for number, mark in marks.items()}


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a result, with their names."""
    if isinstance(value, Tensor):
        yield name, value
        return
    inner: Iterable[tuple[str, Any]]
    if isinstance(value, Mapping):
        inner = ((f".{k}" if dataclasses.is_dataclass(value) else f"[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = ((f".{field}", part) for field, part in zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        inner = ((f"[{place}]", part) for place, part in enumerate(value))
    else:
        inner = ((f".{k}", v) for k, v in (attributes_of(value) or {}).items())
    for step, part in inner:
        yield from _named(part, name + step)


@dataclasses.dataclass(frozen=True)
class Attribute:
    """An attribute that each call sets: its owner, its name there and in the text of the graph, and the
    structure of its value. None: the value is the call's result itself. `read`: the call depends on what it
    was before, so a graph is no use that sets it."""

    owner: Any
    name: str
    label: str
    structure: Structure | None
    read: bool = False


@dataclasses.dataclass(frozen=True)
class Change:
    """What each call sets in an object among its arguments: the object's place, the attribute, key or slice
    of it, and the structure of the value."""

    path: Path
    key: Any
    structure: Structure


@dataclasses.dataclass(frozen=True)
class Captured:
    """A program graph, the structure of its results, and the argument shapes.

    `shapes` has the shape (numbers and sympy expressions) of each tensor argument. `attributes` are set after
    each call; the graph does not depend on what they were before. `changes` are set in its arguments.
    `checks` are the lines of the conditions on values that the graph checks: where one does not hold, the
    model itself raises an error. `asked`: sizes for whose number the code asks. `sides`: what the code
    asked about sizes, and was answered. `around`: what of the state the graph depends on, but for the
    attributes that each call sets. `serves_small`: the graph is for calls with few scores too, as the
    model's own FlexAttention has no gradients on a CPU.
    """

    graph: ProgramGraph
    structure: Structure
    shapes: tuple[tuple[Any, ...], ...]
    attributes: tuple[Attribute, ...] = ()
    changes: tuple[Change, ...] = ()
    checks: tuple[str, ...] = ()
    asked: tuple[Break, ...] = ()
    sides: Sides = UNASKED
    around: Scope = EVERYTHING
    serves_small: bool = False

    @functools.cached_property
    def scope(self) -> Scope:
        """What of the state around a call the graph depends on."""
        left_out = frozenset((id(a.owner), a.name) for a in self.attributes if not a.read)
        return dataclasses.replace(self.around, left_out=left_out)

    def names(self) -> dict[int, str]:
        """The names of the tensors among its results, by their number."""
        found = self.structure.names("result")
        for attribute in self.attributes:
            if attribute.structure is not None:
                found |= attribute.structure.names(attribute.label.removeprefix("model."))
        return found

    def dimensions(self, sizes: Iterable[str]) -> frozenset[tuple[int, int]]:
        """The dimensions, (argument, dimension), whose extents involve these symbolic sizes."""
        return dimensions(self.shapes, set(sizes))
