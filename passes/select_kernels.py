"""SelectKernels: write the name of a kernel into every attention node.

Tries the kernels of the chosen backend in order of preference and takes the first that supports the
program with these dtypes and widths. The name is in the graph, so dumps and the report show it. Cached and
latent attention get only the backend's name: their kernel is chosen at each call.
"""

import dataclasses
from typing import ClassVar

from attngraph.ir.graph.program_graph import Level, ProgramGraph
from attngraph.ir.ops import kernels, nodes
from attngraph.pipeline import Outcome


@dataclasses.dataclass(frozen=True)
class SelectKernels:
    """`backend` names a family of kernels ("cpu", "triton", "reference"); empty: any."""

    serves: ClassVar[tuple[Level, ...]] = (Level.FUSED, Level.CACHED)
    backend: str = ""
    name: str = "select-kernels"
    requires: Level = Level.FUSED
    yields: Level = Level.LOWERED

    def run(self, graph: ProgramGraph) -> Outcome:
        outcome = Outcome()
        for rate, stage in graph.stages.items():
            outcome.notes += [f"{note} of the stage {rate.value}" for note in self.run(stage).notes]
            stage.clean()
        for node in graph.graph.nodes:
            attention = nodes.view(node)
            if isinstance(attention, nodes.Attention):
                if attention.kernel:
                    continue  # the model's own choice
                q, k, v = (n.meta["val"] for n in (attention.q, *attention.keys))
                chosen = kernels.choose(attention.program, (q, k, v), self.backend)
                node.args = attention.with_kernel(chosen.name).args
                outcome.notes.append(f"{chosen.name} for attention in {len(outcome.notes) + 1}")
            elif attention is not None:
                node.args = attention.with_kernel(self.backend).args
        return outcome
