"""The ranks of a mesh that run a model together: the hooks of `runtime/devices.py` for several devices.

Simulated ranks run in this process, on the user's whole parameters, gradients included. Each gets its own
copy of what all have whole, so that the gradient which the user sees is the one that a rank would compute,
not the sum of all ranks' (`ir/ops/collectives.py` says which gradients collectives have). A process that is
one rank of several keeps its own part of a decoder's state. Simulated ranks share one state, which has
everything once for each rank: `kept0` of rank 1 is called `kept0@1` there.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from attngraph.capture.program.layouts import let_go
from attngraph.errors import DisagreementError, NoDecoderError, PlacementError, SavedError
from attngraph.ir.graph import Axis, ProgramGraph, Ranks
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.ir.ops.declare import with_gradients
from attngraph.meaning.check.oracle import Oracle
from attngraph.meaning.check.ranks import PerRank, run_on_ranks
from attngraph.runtime.devices import ONE, OneDevice, OneRank, Own, Runner
from attngraph.runtime.parallel import agree, parameters
from attngraph.runtime.parallel.fetch_early import fetching_early
from attngraph.runtime.parallel.mesh import RankMesh, ShardConfig, rank_mesh


def devices_of(mesh: Any, shard: ShardConfig | None) -> OneDevice:
    """The devices of a mesh of the user's (`rank_mesh`)."""
    found = rank_mesh(mesh, shard or ShardConfig())
    return ONE if found is None else SeveralDevices(found)


class SeveralDevices(OneDevice):
    """The ranks of a mesh: processes, or simulated ones in this process."""

    is_one = False

    def __init__(self, mesh: RankMesh) -> None:
        self.mesh = mesh
        self.has_weights = mesh.is_simulated
        self.has_peers = not mesh.is_simulated and mesh.count > 1
        self._draws = False
        """Whether a graph draws random numbers, so that ranks compare their state of these."""

    # --- to compile ---

    def take(self, model: Callable[..., Any]) -> None:
        if isinstance(model, nn.Module):
            parameters.require_undivided(model, self.mesh)
            if self.mesh.tensor is not None and self.mesh.holds_parts:
                parameters.replicate(model, self.mesh.tensor)

    def passes(self, decoder: bool = False, rounded: str = "") -> dict[str, Any]:
        mesh, config = self.mesh, self.mesh.config
        if decoder and mesh.context is not None and mesh.context.count > 1:
            raise ValueError(
                "cache and an axis of the mesh that divides tokens do not go together: a decoder is divided "
                "by heads. Name that axis in ShardConfig(tensor=...)."
            )
        if rounded and config.cache == "tokens":
            raise ValueError(
                f'a cache of {rounded} whose tokens are divided (ShardConfig(cache="tokens")) is not there '
                "yet: leave one of both out."
            )
        axes = {"heads": mesh.tensor, "tokens": mesh.context}
        found: dict[str, Any] = {w: Axis(a.count, a.group) for w, a in axes.items() if a is not None}
        if decoder:
            found["cache"] = "heads" if rounded else config.cache
        return {**found, "parameters": config.parameters}

    def tracing(self, owner: nn.Module) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.has_weights else parameters.stand_ins(owner)

    def captured(self, graph: ProgramGraph) -> None:
        let_go(graph)

    def runs(self, graph: ProgramGraph, owner: nn.Module, run: Runner) -> tuple[Runner, Own]:
        if graph.ranks is None:
            return run, dict
        self._distribute(graph, owner)
        runner = simulated if self.mesh.is_simulated else lambda graph: fetching_early(run(graph))
        return runner, parameters.Own(graph, owner, self.mesh)

    def steps(self, graph: ProgramGraph, owner: nn.Module, run: Runner) -> tuple[Runner, OneRank]:
        if graph.ranks is None:
            return super().steps(graph, owner, run)
        assert graph.state is not None
        self._distribute(graph, owner)
        own = parameters.Own(graph, owner, self.mesh, keeps=True)
        if self.mesh.is_simulated:
            return on_all_ranks, AllRanks(graph.state, own, graph.ranks)
        rank = self.mesh.rank, self.mesh.count
        return run, OneRank(of_rank(graph.state, rank[0]), own, rank)

    def _distribute(self, graph: ProgramGraph, owner: nn.Module) -> None:
        if self.mesh.is_simulated:
            return
        agree.agree_on_graph(self.mesh, graph)
        if self.mesh.tensor is not None and self.mesh.holds_parts:
            parameters.distribute(graph, owner, self.mesh.tensor)

    def reported(self, graph: ProgramGraph) -> dict[str, Any]:
        return {} if graph.ranks is None else {"ranks": graph.ranks.entry, "context": graph.ranks.context}

    def compiled(self, make: Callable[[], Any]) -> Any:
        if self.mesh.is_simulated:
            return make()
        with self._failing("the graph", contextlib.suppress(DisagreementError)):  # its own error is raised
            found = make()
        if agree.draws_numbers(found.captured.graph.graph) and not self._draws:
            self._draws = True
            agree.agree(self.mesh, "the state of random numbers", agree.random_state())
        return found

    def derived(self, make: Callable[[], Any]) -> Any:
        if self.mesh.is_simulated:
            return make()
        with self._failing("the decoder", contextlib.nullcontext()):
            found = make()
        agree.agree(self.mesh, "the decoder", "derived")
        return found

    @contextlib.contextmanager
    def _failing(self, what: str, around: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Tell the other ranks if this one fails in the body."""
        try:
            yield
        except DisagreementError:
            raise
        except Exception as problem:
            with around:
                agree.agree(self.mesh, what, f"none: {type(problem).__name__}: {problem}")
            raise

    # --- to call ---

    def agree(self, what: str, *given: Any) -> None:
        if self.has_peers and self.mesh.config.agree:
            agree.agree(self.mesh, "the call", f"{what}\n{agree.described(given)}")

    def agree_on_call(self, model: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        if not self.mesh.is_simulated and self.mesh.config.agree:
            training, tokens = getattr(model, "training", False), self.mesh.context is not None
            agree.agree(
                self.mesh, "the call", agree.describe_call(tensors, leaves, training, self._draws, tokens)
            )

    def whose(self, rank: tuple[int, int]) -> str:
        own = not self.has_peers or rank == (self.mesh.rank, self.mesh.count)
        return "a state of this rank" if own else "a state of another rank"

    def lead(self, decided: Tensor) -> Tensor:
        """What rank 0 decided; a tensor of the same shape and dtype on every rank."""
        if not self.has_peers:
            return decided
        found = decided.detach().clone().contiguous().to(self.mesh.axes[0].mesh.device_type)
        for axis in self.mesh.axes:
            torch.distributed.broadcast(found, group=axis.mesh.get_group(), group_src=0)
        return found.to(decided.device)

    # --- what not every mesh can do ---

    def require_placeable(self, model: Any) -> None:
        if not self.mesh.holds_parts:
            super().require_placeable(model)
        parameters.require_contents(model)

    def require_filled(self, model: Any) -> None:
        if isinstance(model, nn.Module) and parameters.unfilled(model):
            raise PlacementError(
                "the model was made on meta, and its weights have not been loaded.\nWhat to do: "
                "compiled.place(example), then attngraph.load_weights(model, path)."
            )

    def require_whole_parameters(self) -> None:
        if self.mesh.holds_parts:
            raise NoDecoderError(
                "the model was traced for few numbers of tokens, so its decoder is to be compared with the "
                "model itself, which no rank has whole.\n"
                'What to do: shard=ShardConfig(parameters="whole").'
            )

    def require_savable(self, what: str) -> None:
        raise SavedError(f"the {what} is divided among ranks; a graph of several ranks is not saved yet.")


def simulated(graph: ProgramGraph) -> Callable[..., Sequence[Any]]:
    """The function that computes a graph's results for all ranks."""
    run = on_all_ranks(graph)
    return lambda *inputs: [one_of_all(value) for value in run(*inputs)]


def on_all_ranks(graph: ProgramGraph) -> Callable[..., Sequence[Any]]:
    """The function that computes a graph's results for all ranks: a `PerRank` where they may differ."""
    assert graph.ranks is not None
    ranks = graph.ranks

    def for_all(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.requires_grad and torch.is_grad_enabled()):
            return value
        return PerRank([value, *(value.detach().requires_grad_() for _ in range(ranks.count - 1))])

    def compute(node: fx.Node, args: Any, kwargs: Any) -> Any:
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return lambda *inputs: _run(graph.graph, map(for_all, inputs), compute, ranks)


def _run(graph: fx.Graph, inputs: Iterable[Any], compute: Callable[..., Any], ranks: Ranks) -> Sequence[Any]:
    order = [n for n in graph.nodes if n.op == "call_function"]
    results: Any = graph.output_node().args[0]
    given = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    return run_on_ranks(order, given, list(results), compute, ranks)


def one_of_all(value: Any) -> Any:
    """The value that all ranks have. (It is a bug in attngraph if they differ.)"""
    if not isinstance(value, PerRank):
        return value
    if not isinstance(value[0], Tensor):
        return value[0]
    first, *others = (own.detach() for own in value)
    if not all(torch.equal(own, first) or torch.allclose(own, first, equal_nan=True) for own in others):
        raise RuntimeError("ranks have different results. Please report it.")
    if not first.is_floating_point():
        return first
    # Every rank gets the gradient.
    return with_gradients(lambda own: [own[0].clone()], lambda grads: [*grads] * len(value), *value)[0]


class AllRanks(OneRank):
    """A graph run for all ranks in this process."""

    def __init__(self, plan: CachePlan, own: Callable[[], Mapping[str, Any]], ranks: Ranks) -> None:
        every: tuple[Any, ...] = (*plan.stores, *plan.carried, *plan.fixed)
        self._names: list[str] = [about.name for about in every]
        self._teams = {store.table: store.team for store in plan.stores if store.team > 1}
        self._ranks, self._count = ranks, ranks.count
        super().__init__(_of_all(plan, ranks.count), own)

    def exact(self, module: fx.GraphModule) -> Any:
        return _ExactOnRanks(module, self._ranks)

    def taken(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        teams = dict.fromkeys((n for n in self._names if _named(n, 0) in kept), self._count) | self._teams
        return {**kept, **{
            name: PerRank(kept[_named(name, rank % team)] for rank in range(self._count))
            for name, team in teams.items()
        }}  # fmt: skip

    def kept(self, results: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            _named(name, rank): value[rank] if isinstance(value, PerRank) else value
            for name, value in results.items()
            for rank in range(self._count)
        }

    def one(self, result: Any) -> Any:
        return one_of_all(result)


def _named(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def of_rank(plan: CachePlan, rank: int) -> CachePlan:
    """What one rank keeps, of ranks that may divide tokens."""
    stores = tuple(dataclasses.replace(s, member=rank % s.team) for s in plan.stores)
    return dataclasses.replace(plan, stores=stores)


def _of_all(plan: CachePlan, count: int) -> CachePlan:
    """What all ranks keep together."""

    def each(values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(dataclasses.replace(v, name=_named(v.name, r)) for v in values for r in range(count))

    stores = tuple(
        dataclasses.replace(s, member=rank % s.team, scales_of=s.scales_of and _named(s.scales_of, rank))
        for s, rank in zip(each(plan.stores), itertools.cycle(range(count)), strict=False)
    )
    return dataclasses.replace(plan, stores=stores, fixed=each(plan.fixed), carried=each(plan.carried))


class _ExactOnRanks:
    """Computes a graph in float64 for all ranks; results are those of every rank where they may differ."""

    def __init__(self, module: fx.GraphModule, ranks: Ranks) -> None:
        self.graph, self.ranks = module.graph, ranks

    def run(self, *inputs: Any) -> Sequence[Any]:
        return _run(self.graph, inputs, Oracle().compute, self.ranks)
