"""What computes a graph: its own module, what Inductor makes of it, or for a decoder's step on ranks, each
rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attngraph.api.options import Options
from attngraph.codegen.cpu.record.replay import Replay
from attngraph.errors import NoDecoderError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.runtime.direct import shortened
from attngraph.runtime.parallel.agree import agree_on_graph
from attngraph.runtime.parallel.fetch_early import fetching_early
from attngraph.runtime.parallel.mesh import RankMesh
from attngraph.runtime.parallel.parameters import Own, distribute
from attngraph.runtime.parallel.simulated import on_all_ranks
from attngraph.runtime.parallel.states import AllRanks, OneRank, of_rank

Runner = Callable[[ProgramGraph], Callable[..., Any]]
"""Makes the function that computes a graph's results from its inputs."""


def runner_of(options: Options) -> Runner:
    """A graph's module, in which ranks fetch keys early, or that compiled by Inductor."""

    def run(graph: ProgramGraph) -> Callable[..., Any]:
        if not options.inductor:
            return fetching_early(graph.module)
        if options.progress is not None:
            options.progress("inductor")
        compiled: Callable[..., Any] = torch.compile(graph.written(), dynamic=True, fullgraph=True)
        return compiled

    return run


def step_runner_of(options: Options) -> Runner:
    """As `runner_of`, for a decoder's step and its stage of the prompt."""
    return runner_of(options) if options.inductor else _step_runner


def _step_runner(graph: ProgramGraph) -> Callable[..., Any]:
    return Replay(graph, shortened) if graph.state is not None else shortened(graph.module)


def step_on_ranks(graph: ProgramGraph, owner: nn.Module, options: Options) -> tuple[Runner, OneRank]:
    """What runs a decoder's graph on this device, on this rank of several, or on simulated ranks; on several
    ranks, once they agree on the graph and have their parts of parameters. (They replay no recorded steps:
    what is recorded when follows from where tensors lie, and all ranks must exchange the same.)

    Raises:
        DisagreementError: ranks have different graphs. PlacementError: as `distribute`.
    """
    mesh = options.mesh
    assert graph.state is not None
    if mesh is None or graph.ranks is None:
        return step_runner_of(options), OneRank(graph.state)
    own = Own(graph, owner, mesh, keeps=True)
    if mesh.is_simulated:
        return on_all_ranks, AllRanks(graph.state, own, graph.ranks)
    agree_on_graph(mesh, graph)
    if mesh.tensor is not None and mesh.holds_parts:
        distribute(graph, owner, mesh.tensor)
    plain = runner_of(options) if options.inductor else lambda graph: shortened(graph.module)
    return plain, OneRank(of_rank(graph.state, mesh.rank), own, (mesh.rank, mesh.count))


def require_whole_parameters(mesh: RankMesh | None) -> None:
    """Check that the model itself can be run beside its decoder.

    Raises:
        NoDecoderError: ranks have parts of its parameters.
    """
    if mesh is not None and mesh.holds_parts:
        raise NoDecoderError(
            "the model was traced for few numbers of tokens, so its decoder is to be compared with the model "
            "itself, which no rank has whole.\n"
            'What to do: shard=ShardConfig(parameters="whole").'
        )
