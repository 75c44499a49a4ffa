"""SelectKernels: write into every attention node who computes it.

Asks the kernels of the chosen backend in their order of preference and takes the first that serves the
program on these dtypes and widths. The name stands in the graph, so a dump and the report show it. Nodes
over a cache, and latent ones, are told the backend alone: what serves them depends on the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attngraph.ir.graph.program_graph import Level, ProgramGraph
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import kernels
from attngraph.ir.ops.nodes import ATTENTION, CACHED, LATENT
from attngraph.pipeline import Outcome

CHOSEN_LATER: dict[Any, int] = {LATENT: 9, CACHED[ATTENTION]: 12, CACHED[LATENT]: 14}
"""Nodes that choose among the kernels of a backend at each call, by its sizes, and at which place they are
told the backend."""


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
            if node.target in CHOSEN_LATER:
                node.args = (*node.args[: CHOSEN_LATER[node.target]], self.backend)
            if node.target is not torch.ops.attngraph.attention.default:
                continue
            if node.args[6]:
                continue  # the model's own choice
            q, k, v = (n.meta["val"] for n in node.args[:3])
            chosen = kernels.choose(parse(node.args[5]), (q, k, v), self.backend)
            node.args = (*node.args[:6], chosen.name)
            outcome.notes.append(f"{chosen.name} for attention in {len(outcome.notes) + 1}")
        return outcome
