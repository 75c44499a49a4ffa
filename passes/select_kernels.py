"""SelectKernels: write into every attention node who computes it.

Asks the kernels of the chosen backend in their order of preference and takes the first that serves the
program on these dtypes and widths. The name stands in the graph, so a dump and the report show it. Nodes
over a cache, and latent ones, are told the backend alone: what serves them depends on the call.
"""

from __future__ import annotations

import dataclasses

from attngraph.ir.graph.program_graph import Level, ProgramGraph
from attngraph.ir.ops import kernels, nodes
from attngraph.pipeline import Outcome


@dataclasses.dataclass(frozen=True)
class SelectKernels:
    """`backend` names a family of kernels ("cpu", "triton", "reference"); empty: any."""

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
