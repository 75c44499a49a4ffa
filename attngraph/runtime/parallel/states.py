"""How one rank, or every rank in this process, runs a graph, and where what a decoder keeps lies.

Simulated ranks run on the user's whole parameters, gradients included. Each gets its own copy of what all
have whole, so that the gradient which the user sees is the one that a rank would compute, not the sum of all
ranks' (`ir/ops/collectives.py` says which gradients collectives have). A process that is one rank of several
keeps its own part of a decoder's state. Simulated ranks share one state, which has everything once for each
rank: `kept0` of rank 1 is called `kept0@1` there.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph import ProgramGraph, Ranks
from attngraph.ir.ops.cached_attention import CachePlan
from attngraph.meaning.check.oracle import Oracle
from attngraph.meaning.check.ranks import PerRank, run_on_ranks
from attngraph.runtime.devices import OneRank


class _Joined(torch.autograd.Function):
    """A result that is equal on all ranks: one of them, whose gradient every rank gets."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        ctx.count = len(values)
        return values[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        grads: tuple[Tensor, ...] = (grad,) * ctx.count
        return grads


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

    return lambda *inputs: _run(graph.graph, map(for_all, inputs), _compute, ranks)


def _run(graph: fx.Graph, inputs: Iterable[Any], compute: Callable[..., Any], ranks: Ranks) -> Sequence[Any]:
    order = [n for n in graph.nodes if n.op == "call_function"]
    results: Any = graph.output_node().args[0]
    given = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    return run_on_ranks(order, given, list(results), compute, ranks)


def _compute(node: fx.Node, args: Any, kwargs: Any) -> Any:
    target: Any = node.target
    return target(*args, **kwargs)


def one_of_all(value: Any) -> Any:
    """The value that all ranks have.

    Raises:
        RuntimeError: they differ: a bug in attngraph.
    """
    if not isinstance(value, PerRank):
        return value
    if not isinstance(value[0], Tensor):
        return value[0]
    for other in value[1:]:
        if not torch.equal(other.detach(), value[0].detach()) and not torch.allclose(
            other.detach(), value[0].detach(), equal_nan=True
        ):
            raise RuntimeError("ranks have different results. Please report it.")
    return _Joined.apply(*value) if value[0].is_floating_point() else value[0]


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
        return _run(self.graph, inputs, Oracle().compute, self.ranks)
