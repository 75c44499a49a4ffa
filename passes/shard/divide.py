"""How every pass begins that divides a graph among the ranks of one axis of a mesh.

A graph may be divided along several axes, one pass after the other: the second divides what each rank of the
first computes.
"""

import abc
import dataclasses

from attngraph.ir.graph import Axis, Level, ProgramGraph, Ranks
from attngraph.passes.canonicalize import forget_operands_of_dtype
from attngraph.pipeline import Outcome


@dataclasses.dataclass(frozen=True)
class Divide(abc.ABC):
    """A pass that divides a graph among `ranks` ranks, whose process group is called `group`.

    `trusts`: bytes of a check above which what the rules derive is taken as it is, and counted in the graph's
    `ranks.unproved`; for plans, whose graphs are never run. None: what cannot be checked is not divided.
    """

    ranks: int = 2
    group: str = ""
    name: str = ""
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED
    trusts: int | None = None

    def run(self, graph: ProgramGraph) -> Outcome:
        """Divide the graph along one more axis."""
        outcome = Outcome()
        if self.ranks > 1:
            axis = Axis(self.ranks, self.group)
            graph.ranks = dataclasses.replace((graph.ranks or Ranks()).along(axis), trusts=self.trusts)
            forget_operands_of_dtype(graph)
            outcome.notes += self.divide(graph, graph.ranks, axis)
        return outcome

    @abc.abstractmethod
    def divide(self, graph: ProgramGraph, ranks: Ranks, axis: Axis) -> list[str]:
        """Divide the graph along an axis, the last of `ranks`; notes for the report."""
