"""The ranks of a mesh that run a model together: the hooks of `runtime/devices.py` for several devices."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.program.layouts import let_go
from attngraph.errors import DisagreementError, NoDecoderError, PlacementError, SavedError
from attngraph.ir.graph import Axis, ProgramGraph
from attngraph.runtime.devices import ONE, OneDevice, OneRank, Own, Runner
from attngraph.runtime.parallel import parameters
from attngraph.runtime.parallel.agree import (
    agree,
    agree_on_graph,
    describe_call,
    described,
    draws_numbers,
    random_state,
)
from attngraph.runtime.parallel.fetch_early import fetching_early
from attngraph.runtime.parallel.mesh import RankMesh, ShardConfig, rank_mesh
from attngraph.runtime.parallel.states import AllRanks, of_rank, on_all_ranks, simulated


def devices_of(mesh: Any, shard: ShardConfig | None) -> OneDevice:
    """The devices of a mesh of the user's.

    Raises:
        TypeError: it is no mesh. ValueError: its axes have no names, or not those of the config.
    """
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
        if self.mesh.is_simulated:
            return simulated, parameters.Own(graph, owner, self.mesh)
        self._distribute(graph, owner)
        return lambda graph: fetching_early(run(graph)), parameters.Own(graph, owner, self.mesh)

    def steps(self, graph: ProgramGraph, owner: nn.Module, run: Runner) -> tuple[Runner, OneRank]:
        if graph.ranks is None:
            return super().steps(graph, owner, run)
        assert graph.state is not None
        own = parameters.Own(graph, owner, self.mesh, keeps=True)
        if self.mesh.is_simulated:
            return on_all_ranks, AllRanks(graph.state, own, graph.ranks)
        self._distribute(graph, owner)
        rank = self.mesh.rank, self.mesh.count
        return run, OneRank(of_rank(graph.state, rank[0]), own, rank)

    def _distribute(self, graph: ProgramGraph, owner: nn.Module) -> None:
        agree_on_graph(self.mesh, graph)
        if self.mesh.tensor is not None and self.mesh.holds_parts:
            parameters.distribute(graph, owner, self.mesh.tensor)

    def reported(self, graph: ProgramGraph) -> dict[str, Any]:
        return {} if graph.ranks is None else {"ranks": graph.ranks.entry, "context": graph.ranks.context}

    def compiled(self, make: Callable[[], Any]) -> Any:
        if self.mesh.is_simulated:
            return make()
        with self._failing("the graph", contextlib.suppress(DisagreementError)):  # its own error is raised
            found = make()
        if draws_numbers(found.captured.graph.graph) and not self._draws:
            self._draws = True
            agree(self.mesh, "the state of random numbers", random_state())
        return found

    def derived(self, make: Callable[[], Any]) -> Any:
        if self.mesh.is_simulated:
            return make()
        with self._failing("the decoder", contextlib.nullcontext()):
            found = make()
        agree(self.mesh, "the decoder", "derived")
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
                agree(self.mesh, what, f"none: {type(problem).__name__}: {problem}")
            raise

    # --- to call ---

    def agree(self, what: str, *given: Any) -> None:
        if self.has_peers and self.mesh.config.agree:
            agree(self.mesh, "the call", f"{what}\n{described(given)}")

    def agree_on_call(self, model: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        if not self.mesh.is_simulated and self.mesh.config.agree:
            training, tokens = getattr(model, "training", False), self.mesh.context is not None
            agree(self.mesh, "the call", describe_call(tensors, leaves, training, self._draws, tokens))

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
        if isinstance(model, nn.Module) and parameters.is_unfilled(model):
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
