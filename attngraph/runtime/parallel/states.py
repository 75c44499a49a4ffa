"""How a decoder's graph is run by one rank or by all simulated ones, and where what it keeps lies.

A process that is one rank of several keeps its own part in a state of its own. Simulated ranks share one
state, which has everything once for each rank: `kept0` of rank 1 is called `kept0@1` there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.graph.ranks import Ranks
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.meaning.check.oracle import Exact, Oracle
from attngraph.meaning.check.ranks import PerRank, run_on_ranks
from attngraph.runtime.parallel.simulated import one_of_all


@dataclasses.dataclass
class OneRank:
    """A graph run on one device, or on one rank of several.

    Attributes:
        plan: what a state keeps. own: gives the inputs that this rank has of its own.
        rank: which rank it is, and of how many.
    """

    plan: CachePlan
    own: Callable[[], Mapping[str, Any]] = dict
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


class AllRanks(OneRank):
    """A graph run for all ranks in this process."""

    def __init__(self, plan: CachePlan, own: Callable[[], Mapping[str, Any]], ranks: Ranks) -> None:
        lists: tuple[Sequence[Any], ...] = (plan.stores, plan.carried, plan.fixed)
        self._names: list[str] = [about.name for every in lists for about in every]
        self._teams = {store.table: store.team for store in plan.stores if store.team > 1}
        self._ranks, self._count = ranks, ranks.count
        super().__init__(_of_all(plan, ranks.count), own)

    def exact(self, module: fx.GraphModule) -> Any:
        return _ExactOnRanks(module, self._ranks)

    def taken(self, kept: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {
            name: PerRank(kept[_named(name, rank)] for rank in range(self._count))
            for name in self._names
            if _named(name, 0) in kept
        }
        tables = {
            name: PerRank(kept[f"{name}@{rank % team}"] for rank in range(self._count))
            for name, team in self._teams.items()
        }
        return {**kept, **own, **tables}

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
    of_each = [of_rank(plan, rank) for rank in range(count)]

    def every(field: str) -> tuple[Any, ...]:
        same = zip(*(getattr(of, field) for of in of_each), strict=True)
        return tuple(dataclasses.replace(v, name=_named(v.name, r)) for of in same for r, v in enumerate(of))

    stores = every("stores")
    scales = [i for i, _ in enumerate(stores) if stores[i].scales_of]
    named = {i: _named(stores[i].scales_of, i % count) for i in scales}
    stores = tuple(dataclasses.replace(s, scales_of=named.get(i, "")) for i, s in enumerate(stores))
    return dataclasses.replace(plan, stores=stores, fixed=every("fixed"), carried=every("carried"))


class _ExactOnRanks:
    """Computes a graph in float64 for all ranks; results are those of every rank where they may differ."""

    def __init__(self, module: fx.GraphModule, ranks: Ranks) -> None:
        self.graph, self.ranks = module.graph, ranks

    def run(self, *inputs: Any) -> Sequence[Any]:
        placeholders = self.graph.find_nodes(op="placeholder")
        order = [n for n in self.graph.nodes if n.op == "call_function"]
        results: Any = self.graph.output_node().args[0]
        given = dict(zip(placeholders, inputs, strict=True))
        return run_on_ranks(order, given, list(results), Oracle().compute, self.ranks)


def states_of(graph: ProgramGraph) -> OneRank:
    """A decoder's graph on one device."""
    assert graph.state is not None
    return OneRank(graph.state)
