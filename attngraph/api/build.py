"""Builds what runs from one call of a model: capture, passes, kernels, and the report of all three.

Which graph is used for which call is decided elsewhere (`compiled`, `runtime/decoder`); `derive` makes the
step of a decoder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import attngraph.codegen  # noqa: F401  registers the kernels
from attngraph.api.compare_sides import compare_sides
from attngraph.api.options import Options
from attngraph.api.records import entries_of, later_of
from attngraph.api.rewritten import captured_again, owner_of, rewritten
from attngraph.capture.captured import Captured
from attngraph.capture.trace_lock import LOCK
from attngraph.codegen.cpu.replay import Replay
from attngraph.errors import NoDecoderError, NotFusedError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.report.report import CompileReport
from attngraph.runtime.direct import shortened
from attngraph.runtime.executable import Executable
from attngraph.runtime.parallel.agree import agree_on_graph
from attngraph.runtime.parallel.fetch_early import fetching_early
from attngraph.runtime.parallel.mesh import RankMesh
from attngraph.runtime.parallel.parameters import Own, distribute, stand_ins
from attngraph.runtime.parallel.states import AllRanks, OneRank, of_rank, on_all_ranks, simulated


@LOCK.trace()
def compile_graph(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options,
    sides: bool = False,
) -> Executable:  # fmt: skip
    """Capture one call of `target`, run the passes, and make it executable. `sides`: find out for which sizes
    of 1 the graph is right, too. (A compiled module has other graphs for these.)

    Raises:
        CaptureError: torch.export cannot capture it. NotFusedError: under `strict`, something that looks
            like attention was not fused. DumpError: the dump cannot be written.
    """
    start = time.perf_counter()
    if options.inductor and torch.is_grad_enabled():
        # The graph is one operation for gradients: its results cannot follow from one that waits.
        options = dataclasses.replace(options, later=())
    owner = owner_of(target)
    shared = options.mesh is not None and not options.mesh.is_simulated
    with stand_ins(owner) if shared else contextlib.nullcontext():
        made = rewritten(target, args, kwargs, options, options.pipeline(), sides)
    if made.before is not None:
        again = functools.partial(captured_again, target, fixed=made.fixed, tables=False)
        found_sides = compare_sides(made.captured, made.before, owner, args, kwargs, again)
        made.captured = dataclasses.replace(made.captured, sides=found_sides)
    result, graph = made.result, made.captured.graph
    entries = tuple(entries_of(graph))
    found = _executable(made.captured, owner, options)
    seconds = time.perf_counter() - start
    report = CompileReport(
        entries, tuple(result.missed), tuple(result.records), (), seconds, captured=result.captured,
        code=result.code, ranks=None if graph.ranks is None else graph.ranks.entry,
        context=None if graph.ranks is None else graph.ranks.context, numbers=made.numbers,
        capture=made.seconds, later=later_of(made.captured),
    )  # fmt: skip
    if made.dump is not None:
        made.dump.finish(report)
    if options.strict and report.unfused:
        first = report.unfused[0]
        raise NotFusedError(
            f"{len(report.unfused)} softmax-like place(s) were not fused; the first is at "
            f"{first.source or 'an unknown line'}: {first.reason}.\n"
            "What to do: rewrite that place, or compile without strict=True, which leaves it as it is."
        )
    found.report = report
    return found


def _executable(captured: Captured, owner: nn.Module, options: Options) -> Executable:
    """What runs a graph: on this device, on this rank of several, or on simulated ranks."""
    mesh, graph = options.mesh, captured.graph
    if mesh is None or graph.ranks is None:
        return Executable(captured, owner, runner_of(options))
    if mesh.is_simulated:
        return Executable(captured, owner, simulated, Own(graph, owner, mesh))
    agree_on_graph(mesh, graph)
    if mesh.tensor is not None and mesh.holds_parts:
        distribute(graph, owner, mesh.tensor)
    return Executable(captured, owner, runner_of(options), Own(graph, owner, mesh))


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
