"""Several ranks in one process: a graph run for all of them, node by node, and compared with one device.

Where ranks exchange values, the collective is computed on the list of the ranks' values
(`ir/ops/collectives.py`), so no processes are needed, and neither is a mode that stands for them. What is
computed from the same tensors by every rank is computed once.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import Input, ProgramGraph
from attngraph.ir.graph.ranks import Ranks, Shard
from attngraph.ir.ops.collectives import COLLECTIVES
from attngraph.ir.ops.exchange import EXCHANGING, together
from attngraph.meaning.check.check import TOLERANCE, Checks, Verdict, _gradients, _one_thread, rounding
from attngraph.meaning.check.comparison import compare, elementwise, largest
from attngraph.meaning.check.region import bytes_in_float64, region
from attngraph.meaning.check.sample import SMALLEST, Sample, choose_sizes

TOO_LARGE = "too large to be checked in float64 at its fixed sizes"
Compute = Callable[[fx.Node, Any, Any], Any]
"""Computes one operation: the node, its arguments, its keyword arguments."""


class PerRank(list[Any]):
    """A value of every rank."""


def run_on_ranks(
    order: Sequence[fx.Node], given: Mapping[fx.Node, Any], wanted: Sequence[fx.Node], compute: Compute,
    ranks: Ranks,
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


def _computed(node: fx.Node, found: Mapping[fx.Node, Any], compute: Compute, ranks: Ranks) -> Any:
    differ = any(isinstance(found[n], PerRank) for n in node.all_input_nodes)
    if node.target in COLLECTIVES:
        return _together(node, found, ranks)
    if node.target in EXCHANGING:
        return _exchanging(node, found, compute, ranks)
    if not differ:
        return compute(node, *fx.map_arg((node.args, node.kwargs), found.__getitem__))
    results = PerRank()
    before = torch.get_rng_state()
    for rank in range(ranks.count):
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            torch.set_rng_state(before)  # ranks draw the same numbers

        results.append(compute(node, *_own(node, found, rank)))
    return results


def _own(node: fx.Node, found: Mapping[fx.Node, Any], rank: int) -> Any:
    """The arguments and keyword arguments that one rank has."""

    def mine(n: fx.Node) -> Any:
        return found[n][rank] if isinstance(found[n], PerRank) else found[n]

    return fx.map_arg((node.args, node.kwargs), mine)


def _exchanging(node: fx.Node, found: Mapping[fx.Node, Any], compute: Compute, ranks: Ranks) -> PerRank:
    """An operation in which ranks exchange values: of those of one process group after the other."""
    results = PerRank([None] * ranks.count)
    for line in ranks.lines(str(node.args[-1])):
        runs = [functools.partial(compute, node, *_own(node, found, rank)) for rank in line]
        for rank, result in zip(line, together(runs), strict=True):
            results[rank] = result
    return results


def _together(node: fx.Node, found: Mapping[fx.Node, Any], ranks: Ranks) -> PerRank:
    """A collective of all ranks: those of one process group after the other."""
    whole: Any = found[node.args[0]]  # type: ignore[index]
    results = PerRank([None] * ranks.count)
    for line in ranks.lines(str(node.args[-1])):
        parts = [whole[rank] if isinstance(whole, PerRank) else whole for rank in line]

        def of_line(n: fx.Node, first: int = line[0]) -> Any:
            """What else a collective is given, which is equal on the ranks of a group."""
            return found[n][first] if isinstance(found[n], PerRank) else found[n]

        made = COLLECTIVES[node.target](fx.map_arg(node.args[1:], of_line), parts)
        for rank, result in zip(line, made, strict=True):
            results[rank] = result
    return results


class RankChecks(Checks):
    """The verdicts on what ranks compute together. `learns` tells to which values gradients flow; `below` has
    the number of rows of the table that integers choose from, `ends` the tokens in which integers say where
    each expert's end."""

    def __init__(self, graph: ProgramGraph, learns: Callable[[fx.Node], bool]) -> None:
        super().__init__(graph)
        self.learns, self.below = learns, dict[fx.Node, int]()
        self.ends = dict[fx.Node, fx.Node]()

    def about(self, node: fx.Node, order: Sequence[fx.Node]) -> Any:
        ranks, told = self.graph.ranks, _given(self.graph).get(node)
        if ranks is None or told is None:
            return None
        if told.kind == "places":
            return tuple(ranks.places[told.name].of.flatten().tolist())
        if told.kind == "shard":
            shard = ranks.shards[told.name]
            names = [_given(self.graph)[n].name if n in _given(self.graph) else "" for n in order]
            whose = names.index(shard.parameter) if shard.parameter in names else -1
            return whose, shard.dims, tuple(tuple(p.flatten().tolist()) for p in shard.places)
        return None

    def verdict(self, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node]) -> Verdict:
        ranks = self.graph.ranks
        if ranks is not None and ranks.trusts is not None:
            order = region((old,), leaves)
            if _bytes_needed(self.graph, order, self.graph.hints) > ranks.trusts:
                ranks.unproved += 1
                return Verdict(0.0, (), "")
        return same_on_ranks(self.graph, old, new, leaves, self.learns, self.below, self.ends)


def _given(graph: ProgramGraph) -> dict[fx.Node, Input]:
    return graph.given()


@_one_thread()
def same_on_ranks(
    graph: ProgramGraph, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node],
    learns: Callable[[fx.Node], bool], below: Mapping[fx.Node, int] | None = None,
    ends: Mapping[fx.Node, fx.Node] | None = None,
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
        if _bytes_needed(graph, order, at) > 2 * budgets.CHECK_BYTES:
            return Verdict(worst, tuple(tried), TOO_LARGE)
        sample = Sample(graph.known_values(), at, number)
        for node, rows in (below or {}).items():
            sample.draw_below(node, rows)
        for node, tokens in (ends or {}).items():
            sample.draw_ends(node, tokens)
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


def _bytes_needed(graph: ProgramGraph, order: Sequence[fx.Node], sizes: Mapping[str, int]) -> int:
    """The bytes of a check: values of every rank, one parameter more for all, and the gradients of both."""
    assert graph.ranks is not None
    given = _given(graph)
    weights = [n for n in order if n in given and given[n].kind in ("parameter", "shard")]
    own, every = bytes_in_float64(weights, sizes), bytes_in_float64(order, sizes)
    return 4 * own + (2 + graph.ranks.count) * (every - own)


def _both(
    graph: ProgramGraph, old: fx.Node, new: fx.Node, orders: tuple[Sequence[fx.Node], Sequence[fx.Node]],
    leaves: frozenset[fx.Node], sample: Sample, learns: Callable[[fx.Node], bool],
) -> list[tuple[str, Tensor, Tensor]]:  # fmt: skip
    """What is compared, as (name, value before, value on ranks). The graph may be one for ranks of other axes
    already, which have values of their own before and after."""
    ranks = graph.ranks
    assert ranks is not None
    begins = [n for n in orders[0] if n in leaves or n.op == "placeholder"]
    with torch.set_grad_enabled(graph.gradients):
        drawn = {
            n: sample.draw(n, learns(n)) for n in begins
            if isinstance(n.meta["val"], Tensor) and not _is_places(graph, n)
        }  # fmt: skip
        sides = []
        for order, node, at in zip(orders, (old, new), (ranks.before, ranks), strict=True):
            start, copies = _begin(graph, at, order, drawn, sample)
            (results,) = run_on_ranks(order, sample.known(order, start), (node,), sample.oracle.compute, at)
            found = results if isinstance(results, PerRank) else PerRank([results] * at.count)
            sides.append([("value", found), *_learned(found, drawn, copies, graph.gradients)])
    each = ranks.count // ranks.before.count
    return [
        (what, wanted, mine)
        for (what, theirs), (_, ours) in zip(*sides, strict=True)
        for number, mine in enumerate(ours)
        for wanted in (theirs[number // each],)
    ]


def _learned(
    found: Sequence[Tensor], drawn: Mapping[fx.Node, Tensor], copies: Mapping[fx.Node, PerRank], learns: bool
) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """The gradients of what the ranks begin with: of every rank's own copy, and of its parts."""
    if not (learns and found[0].is_floating_point()):
        return
    generator = torch.Generator().manual_seed(len(drawn))
    weight = torch.randn(found[0].shape, generator=generator, dtype=torch.float64)
    inputs = {n: t for n, t in drawn.items() if t.requires_grad}
    together = torch.stack([torch.where(r.isfinite(), r, 0.0) for r in found])
    flat = [t for n in inputs for t in (inputs[n], *copies.get(n, ()))]
    grads = iter(_gradients(together, weight.expand_as(together), flat))
    for n in inputs:
        of_parts = next(grads)
        own = [next(grads) for _ in copies.get(n, ())] or [torch.zeros_like(of_parts)] * len(found)
        yield f"gradient for {n}", [of_parts + g for g in own]


def _is_places(graph: ProgramGraph, node: fx.Node) -> bool:
    told = _given(graph).get(node)
    return told is not None and told.kind == "places"


def _begin(
    graph: ProgramGraph, ranks: Ranks, order: Sequence[fx.Node], given: Mapping[fx.Node, Tensor],
    sample: Sample,
) -> tuple[dict[fx.Node, Any], dict[fx.Node, PerRank]]:  # fmt: skip
    """What the ranks begin with, and their copies of every tensor that all ranks have whole: the gradient of
    such a tensor is the one that a rank has of its own copy."""
    placeholders = _given(graph)
    by_name = {i.name: n for n, i in placeholders.items() if i.kind == "parameter"}
    start: dict[fx.Node, Any] = {}
    copies: dict[fx.Node, PerRank] = {}
    for node in order:
        told = placeholders.get(node)
        if node in given:
            tensor = given[node]
            if not tensor.requires_grad:
                start[node] = tensor
                continue
            every = PerRank(tensor.detach().requires_grad_() for _ in range(ranks.count))
            start[node], copies[node] = every, every
        elif told is not None and told.kind == "shard":
            shard = ranks.shards[told.name]
            whole = given.get(by_name[shard.parameter])
            whole = sample.draw(by_name[shard.parameter]) if whole is None else whole
            start[node] = parts_of(shard, whole, ranks)
        elif told is not None and told.kind == "places":
            numbers = ranks.places[told.name]
            start[node] = PerRank(ranks.of_each(numbers.group, list(numbers.of)))
    return start, copies


def parts_of(shard: Shard, whole: Tensor, ranks: Ranks) -> PerRank:
    """The parts that ranks have of a parameter. Ranks that have the same part of another axis have equal
    gradients of it, so only the first of them tells the parameter."""
    own = [shard.of(whole, place) for place in range(len(shard.places[0]))]
    parts = ranks.of_each(shard.group, own)
    firsts = zip(parts, ranks.is_first(shard.group), strict=True)
    return PerRank(p if first else p.detach().requires_grad_(p.requires_grad) for p, first in firsts)
