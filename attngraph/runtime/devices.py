"""The devices that a model runs on: the one door to everything that several of them need.

A model runs on the device that its tensors are on. What would be otherwise if there were several, everybody
asks `OneDevice`, and a graph that runs, `OneRank`. `parallel/several.py` has the same hooks for the ranks of
a mesh; nobody else needs to know of them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from attngraph.errors import CacheError, PlacementError
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.meaning.check.oracle import Exact

Runner = Callable[[ProgramGraph], Callable[..., Any]]
"""Makes the function that computes a graph's results from its inputs."""
Own = Callable[[], Mapping[str, Any]]
"""Gives the inputs of a graph that this rank has of its own."""


@dataclasses.dataclass
class OneRank:
    """A decoder's graph run on one device, or on one rank of several.

    Attributes:
        plan: what a state keeps. own: gives the inputs that this rank has of its own.
        rank: which rank it is, and of how many.
    """

    plan: CachePlan
    own: Own = dict
    rank: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        divided = (s for s in self.plan.stores if s.team > 1)
        self._tables = {store.table: f"{store.table}@{store.member}" for store in divided}

    def exact(self, module: fx.GraphModule) -> Any:
        """An interpreter that computes a graph in float64."""
        return Exact(module)

    def taken(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a state keeps, and where, as inputs of the graph."""
        if not self._tables:
            return kept
        return {**kept, **{name: kept[own] for name, own in self._tables.items()}}

    def kept(self, results: Mapping[str, Any]) -> Mapping[str, Any]:
        """Results of the graph as a state keeps them."""
        return results

    def one(self, result: Any) -> Any:
        """A result that is equal on all ranks."""
        return result

    def require_own(self, saved: tuple[int, int]) -> None:
        """Check that a saved state is one of this rank: else it is a CacheError."""
        if saved != self.rank:
            (rank, ranks), (mine, of) = saved, self.rank
            raise CacheError(
                f"this state was saved by rank {rank} of {ranks}, and this is rank {mine} of {of}. What to "
                "do: give each rank a file of its own."
            )


class OneDevice:
    """A model runs on the device that its tensors are on."""

    is_one = True
    has_weights = True
    """Whether the model's weights are there while it is traced."""
    has_peers = False
    """Whether other processes make the same calls."""

    # --- to compile ---

    def take(self, model: Callable[..., Any]) -> None:
        """Take a model that is to be compiled, if no other mesh divides its parameters already."""

    def passes(self, decoder: bool = False, rounded: str = "") -> dict[str, Any]:
        """What `passes.order` is told of ranks; a ValueError where a decoder, or its cache, cannot be divided
        like this. `rounded`: the dtype of 8 bits of a decoder's cache, if it has one."""
        return {}

    def tracing(self, owner: nn.Module) -> contextlib.AbstractContextManager[None]:
        """What is around a trace of the model."""
        return contextlib.nullcontext()

    def captured(self, graph: ProgramGraph) -> None:
        """Prepare a graph that was captured for the passes."""

    def runs(self, graph: ProgramGraph, owner: nn.Module, run: Runner) -> tuple[Runner, Own]:
        """What computes a graph, where `run` does on one device, and what it has of its own."""
        return run, dict

    def steps(self, graph: ProgramGraph, owner: nn.Module, run: Runner) -> tuple[Runner, OneRank]:
        """The same of a decoder's graph."""
        assert graph.state is not None
        return run, OneRank(graph.state)

    def reported(self, graph: ProgramGraph) -> dict[str, Any]:
        """What the report says of ranks, by the names of its fields."""
        return {}

    def compiled(self, make: Callable[[], Any]) -> Any:
        """The executable that `make` gives; where one rank has none, no rank has one."""
        return make()

    def derived(self, make: Callable[[], Any]) -> Any:
        """The same of a decoder's step."""
        return make()

    # --- to call ---

    def agree(self, what: str, *given: Any) -> None:
        """Check that all ranks make this call of a decoder, with equal tensors."""

    def agree_on_call(self, model: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Check that all ranks make this call of a compiled module, before anything else is exchanged."""

    def whose(self, rank: tuple[int, int]) -> str:
        """Whose part of what was cached a state has, as ranks can compare it."""
        return ""

    def lead(self, decided: Tensor) -> Tensor:
        """What was decided for all ranks."""
        return decided

    # --- what not every mesh can do ---

    def require_placeable(self, model: Any) -> None:
        """Check that ranks hold parts of the model's parameters, and that its buffers have contents."""
        raise PlacementError(
            "there is nothing to place: parameters are divided among processes by an axis of the mesh that "
            'divides heads, unless ShardConfig(parameters="whole") is given.'
        )

    def require_filled(self, model: Any) -> None:
        """Check that the parameters of a model have memory, and so contents."""

    def require_whole_parameters(self) -> None:
        """Check that the model itself can be run beside its decoder."""

    def require_savable(self, what: str) -> None:
        """Check that `what` can be written to files."""


ONE = OneDevice()
