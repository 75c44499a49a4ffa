"""Several ranks in one process: a graph run for all of them, node by node, and compared with one device.

Where ranks exchange values, the collective is computed on the list of the ranks' values
(`ir/ops/collectives.py`), so no processes are needed, and neither is a mode that stands for them. What is
computed from the same tensors by every rank is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import Input, ProgramGraph
from attngraph.ir.graph.ranks import Ranks
from attngraph.ir.ops.collectives import COLLECTIVES
from attngraph.meaning.check.check import TOLERANCE, Verdict, _gradients, _one_thread
from attngraph.meaning.check.comparison import compare, elementwise, largest
from attngraph.meaning.check.once import Checks
from attngraph.meaning.check.region import bytes_in_float64, region
from attngraph.meaning.check.rounding import rounding
from attngraph.meaning.check.sample import SMALLEST, Sample, choose_sizes

Compute = Callable[[fx.Node, Any, Any], Any]
"""Computes one operation: the node, its arguments, its keyword arguments."""


class PerRank(list[Any]):
    """A value of every rank."""


def run_on_ranks(
    order: Sequence[fx.Node], given: Mapping[fx.Node, Any], wanted: Sequence[fx.Node], compute: Compute,
    ranks: int,
) -> list[Any]:  # fmt: skip
    """The values of `wanted`: a `PerRank` where ranks may differ.

    Args:
        order: the nodes in between, operands first. given: what they begin with.
    """
    found = dict(given)
    last = {operand: node for node in order for operand in node.all_input_nodes}
    for node in order:
        if node in found:
            continue
        found[node] = _computed(node, found, compute, ranks)
        for operand in node.all_input_nodes:
            if last[operand] is node and operand not in wanted:
                found.pop(operand, None)
    return [found[node] for node in wanted]


def _computed(node: fx.Node, found: Mapping[fx.Node, Any], compute: Compute, ranks: int) -> Any:
    differ = any(isinstance(found[n], PerRank) for n in node.all_input_nodes)
    if node.target in COLLECTIVES:
        whole = found[node.args[0]]  # type: ignore[index]
        parts = whole if isinstance(whole, PerRank) else [whole] * ranks
        # What else a collective is given is equal on all ranks.
        others = fx.map_arg(
            node.args[1:], lambda n: found[n][0] if isinstance(found[n], PerRank) else found[n]
        )
        return PerRank(COLLECTIVES[node.target](others, parts))
    if not differ:
        return compute(node, *fx.map_arg((node.args, node.kwargs), found.__getitem__))
    results = PerRank()
    before = torch.get_rng_state()
    for rank in range(ranks):
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            torch.set_rng_state(before)  # ranks draw the same numbers

        def mine(n: fx.Node, rank: int = rank) -> Any:
            return found[n][rank] if isinstance(found[n], PerRank) else found[n]

        results.append(compute(node, *fx.map_arg((node.args, node.kwargs), mine)))
    return results


class RankChecks(Checks):
    """The verdicts on what ranks compute together. `learns` tells to which values gradients flow; `below` has
    the number of rows of the table that integers choose from."""

    def __init__(self, graph: ProgramGraph, learns: Callable[[fx.Node], bool]) -> None:
        super().__init__(graph)
        self.learns, self.below = learns, dict[fx.Node, int]()

    def about(self, node: fx.Node, order: Sequence[fx.Node]) -> Any:
        ranks, told = self.graph.ranks, _given(self.graph).get(node)
        if ranks is None or told is None:
            return None
        if told.kind == "places":
            return tuple(ranks.places[told.name].flatten().tolist())
        if told.kind == "shard":
            shard = ranks.shards[told.name]
            names = [_given(self.graph)[n].name if n in _given(self.graph) else "" for n in order]
            whose = names.index(shard.parameter) if shard.parameter in names else -1
            return whose, shard.dims, tuple(tuple(p.flatten().tolist()) for p in shard.places)
        return None

    def verdict(self, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node]) -> Verdict:
        return same_on_ranks(self.graph, old, new, leaves, self.learns, self.below)


def _given(graph: ProgramGraph) -> dict[fx.Node, Input]:
    return dict(zip(graph.placeholders(), graph.inputs, strict=True))


@_one_thread()
def same_on_ranks(
    graph: ProgramGraph, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node],
    learns: Callable[[fx.Node], bool], below: Mapping[fx.Node, int] | None = None,
) -> Verdict:  # fmt: skip
    """Whether `new`, computed by all ranks together, equals `old` on every rank, in float64: the value, and
    the gradients that the backward pass of the ranks gives, at two choices of sizes."""
    assert graph.ranks is not None
    order, theirs = region((old,), leaves), region((new,), leaves)
    given = list(dict.fromkeys([*leaves, *(n for n in order if n.op == "placeholder")]))
    sizes = choose_sizes(given, graph.admits, graph.hints)
    if bytes_in_float64(order, {**graph.hints, **dict(*sizes[-1:])}) > budgets.SAMPLE_BYTES:
        sizes = choose_sizes(given, graph.admits, graph.hints, SMALLEST)[:1]
    tolerance = TOLERANCE + rounding(order)
    worst, problem = 0.0, ""
    tried: list[dict[str, int]] = []
    for number, chosen in enumerate((*sizes, graph.hints)):
        if number == len(sizes) and tried:
            break
        at = {**graph.hints, **chosen}
        if (2 + graph.ranks.count) * bytes_in_float64(order, at) > 2 * budgets.CHECK_BYTES:
            return Verdict(worst, tuple(tried), "too large to be checked in float64 at its fixed sizes")
        sample = Sample(graph.known_values(), at, number)
        for node, rows in (below or {}).items():
            sample.draw_below(node, rows)
        try:
            pairs = _both(graph, old, new, (order, theirs), frozenset(leaves), sample, learns)
        except (IndexError, RuntimeError, ValueError) as cause:
            problem = f"cannot be run at small sizes: {cause}"
            continue
        tried.append(dict(chosen))
        for what, wanted, found in pairs:
            added = largest(wanted) if what != "value" else 0.0
            result = compare(found, wanted, elementwise(tolerance, added))
            if not result.holds:
                return Verdict(result.error, tuple(tried), f"its {what} differs: {result}")
            worst = max(worst, result.error)
    return Verdict(worst, tuple(tried), "" if tried else problem)


def _both(
    graph: ProgramGraph, old: fx.Node, new: fx.Node, orders: tuple[Sequence[fx.Node], Sequence[fx.Node]],
    leaves: frozenset[fx.Node], sample: Sample, learns: Callable[[fx.Node], bool],
) -> list[tuple[str, Tensor, Tensor]]:  # fmt: skip
    """What is compared, as (name, value on one device, value on ranks)."""
    ranks = graph.ranks
    assert ranks is not None
    begins = [n for n in orders[0] if n in leaves or n.op == "placeholder"]
    with torch.set_grad_enabled(graph.gradients):
        given = {n: sample.draw(n, learns(n)) for n in begins if isinstance(n.meta["val"], Tensor)}
        (wanted,) = sample.evaluate(orders[0], given, old)
        start, copies = _begin(graph, ranks, orders[1], given, sample)
        known = sample.known(orders[1], start)
        (results,) = run_on_ranks(orders[1], known, (new,), sample.oracle.compute, ranks.count)
        found = results if isinstance(results, PerRank) else PerRank([results] * ranks.count)
        pairs = [("value", wanted, one) for one in found]
        if graph.gradients and wanted.is_floating_point():
            weight = torch.randn(wanted.shape, generator=sample.generator, dtype=torch.float64)
            inputs = {n: t for n, t in given.items() if t.requires_grad}
            mine = _gradients(wanted, weight, list(inputs.values()))
            together_ = torch.stack([torch.where(r.isfinite(), r, 0.0) for r in found])
            first = {n: copies.get(n, t) for n, t in inputs.items()}
            every = [*first.values(), *(inputs[n] for n in copies)]
            theirs = _gradients(together_, weight.expand_as(together_), every)
            sums = dict(zip(first, theirs, strict=False))
            for n, extra in zip(copies, theirs[len(first) :], strict=True):
                sums[n] = sums[n] + extra
            pairs += [(f"gradient for {n}", a, sums[n]) for n, a in zip(inputs, mine, strict=True)]
    return pairs


def _begin(
    graph: ProgramGraph, ranks: Ranks, order: Sequence[fx.Node], given: Mapping[fx.Node, Tensor],
    sample: Sample,
) -> tuple[dict[fx.Node, Any], dict[fx.Node, Tensor]]:  # fmt: skip
    """What the ranks begin with, and rank 0's copy of every tensor that all ranks have whole: the gradient of
    such a tensor is the one that a rank has of its own copy."""
    placeholders = _given(graph)
    by_name = {i.name: n for n, i in placeholders.items() if i.kind == "parameter"}
    start: dict[fx.Node, Any] = {}
    copies: dict[fx.Node, Tensor] = {}
    for node in order:
        told = placeholders.get(node)
        if told is not None and told.kind == "shard":
            shard = ranks.shards[told.name]
            whole = given.get(by_name[shard.parameter])
            whole = sample.draw(by_name[shard.parameter]) if whole is None else whole
            start[node] = PerRank(shard.of(whole, rank) for rank in range(ranks.count))
        elif told is not None and told.kind == "places":
            start[node] = PerRank(ranks.places[told.name])
        elif node in given:
            tensor = given[node]
            if not tensor.requires_grad:
                start[node] = tensor
                continue
            every = PerRank(tensor.detach().requires_grad_() for _ in range(ranks.count))
            start[node], copies[node] = every, every[0]
    return start, copies
