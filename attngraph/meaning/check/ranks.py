"""Several ranks in one process: a graph run for all of them, node by node, and compared with one device.

Where ranks exchange values, the collective is computed on the list of the ranks' values
(`ir/ops/collectives.py`), so no processes are needed, and neither is a mode that stands for them. What is
computed from the same tensors by every rank is computed once.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph import ProgramGraph, Ranks, Shard
from attngraph.ir.ops.collectives import COLLECTIVES, EXCHANGING, together
from attngraph.ir.walk import computed
from attngraph.meaning.check import check
from attngraph.meaning.check.check import Checks, Pair, TooLarge, Verdict, compared
from attngraph.meaning.check.region import bytes_in_float64, region
from attngraph.meaning.check.sample import SMALLEST, Sample, choose_sizes

_One = TypeVar("_One")
Two = tuple[_One, _One]
"""What is said of the old node, and of the new one."""
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

    def of_all(node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
        if node.target in COLLECTIVES or node.target in EXCHANGING:
            return _together(node, found, compute, ranks)
        if not any(isinstance(found[n], PerRank) for n in node.all_input_nodes):
            return compute(node, *_own(node, found, 0))
        results = PerRank()
        before = torch.get_rng_state()
        for rank in range(ranks.count):
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                torch.set_rng_state(before)  # ranks draw the same numbers
            results.append(compute(node, *_own(node, found, rank)))
        return results

    return computed(order, operator.attrgetter("all_input_nodes"), of_all, wanted, given)


def _own(node: fx.Node, found: Mapping[fx.Node, Any], rank: int) -> Any:
    """The arguments and keyword arguments that one rank has."""

    def mine(n: fx.Node) -> Any:
        return found[n][rank] if isinstance(found[n], PerRank) else found[n]

    return fx.map_arg((node.args, node.kwargs), mine)


def _together(node: fx.Node, found: Mapping[fx.Node, Any], compute: Compute, ranks: Ranks) -> PerRank:
    """A collective, or an operation in which ranks exchange values: of the ranks of one process group after
    the other. What else a collective is given is equal on the ranks of a group."""
    results = PerRank([None] * ranks.count)
    for line in ranks.lines(str(node.args[-1])):
        given = [_own(node, found, rank) for rank in line]
        if node.target in COLLECTIVES:
            made = COLLECTIVES[node.target](given[0][0][1:], [args[0] for args, _ in given])
        else:
            made = together([functools.partial(compute, node, *own) for own in given])
        for rank, result in zip(line, made, strict=True):
            results[rank] = result
    return results


class _OnRanks(Checks):
    """The verdicts on what ranks compute. `learns` tells to which values gradients flow. What takes more
    bytes than the ranks trust is not computed."""

    def __init__(self, graph: ProgramGraph, learns: Callable[[fx.Node], bool]) -> None:
        super().__init__(graph)
        self.learns = learns

    @property
    def ranks(self) -> Ranks:
        assert self.graph.ranks is not None
        return self.graph.ranks

    def verdict(self, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node]) -> Verdict:
        graph, orders = self.graph, (region((old,), leaves), region((new,), leaves))
        if self.ranks.trusts is not None and self._needed(orders[0], graph.hints) > self.ranks.trusts:
            self.ranks.unproved += 1
            return Verdict(0.0, (), "")
        begins = list(dict.fromkeys([*leaves, *(n for n in orders[0] if n.op == "placeholder")]))
        sizes = choose_sizes(begins, graph.admits, graph.hints)
        if bytes_in_float64(orders[0], {**graph.hints, **dict(*sizes[-1:])}) > budgets.SAMPLE_BYTES:
            sizes = choose_sizes(begins, graph.admits, graph.hints, SMALLEST)[:1]

        def pairs(sample: Sample) -> Iterable[Pair]:
            if self._needed(orders[0], sample.sizes) > 2 * budgets.CHECK_BYTES:
                raise TooLarge
            return self._pairs((old, new), orders, frozenset(leaves), sample)

        return compared(graph, sizes, check.TOLERANCE + check.rounding(orders[0]), pairs)

    def _needed(self, order: Sequence[fx.Node], sizes: Mapping[str, int]) -> int:
        """The bytes of a check."""
        raise NotImplementedError

    def _pairs(
        self, nodes: Two[fx.Node], orders: Two[Sequence[fx.Node]], leaves: frozenset[fx.Node], sample: Sample
    ) -> Iterable[Pair]:
        """What is compared of two nodes, which these orders compute."""
        raise NotImplementedError


class RankChecks(_OnRanks):
    """The verdicts on what ranks compute together: whether it is, on every rank, the value before, with the
    gradients that the backward pass of the ranks gives. `below` has the number of rows of the table that
    integers choose from, `ends` the tokens in which integers say where each expert's end."""

    def __init__(self, graph: ProgramGraph, learns: Callable[[fx.Node], bool]) -> None:
        super().__init__(graph, learns)
        self.below, self.ends = dict[fx.Node, int](), dict[fx.Node, fx.Node]()

    def about(self, node: fx.Node, order: Sequence[fx.Node]) -> Any:
        given = self.graph.given()
        told = given.get(node)
        if told is not None and told.kind == "places":
            return tuple(self.ranks.places[told.name].of.flatten().tolist())
        if told is not None and told.kind == "shard":
            shard = self.ranks.shards[told.name]
            names = [given[n].name if n in given else "" for n in order]
            whose = names.index(shard.parameter) if shard.parameter in names else -1
            return whose, shard.dims, tuple(tuple(p.flatten().tolist()) for p in shard.places)
        return None

    def _needed(self, order: Sequence[fx.Node], sizes: Mapping[str, int]) -> int:
        """Values of every rank, one parameter more for all, and the gradients of both."""
        given = self.graph.given()
        weights = [n for n in order if n in given and given[n].kind in ("parameter", "shard")]
        own, every = bytes_in_float64(weights, sizes), bytes_in_float64(order, sizes)
        return 4 * own + (2 + self.ranks.count) * (every - own)

    def _pairs(
        self, nodes: Two[fx.Node], orders: Two[Sequence[fx.Node]], leaves: frozenset[fx.Node], sample: Sample
    ) -> Iterable[Pair]:
        for node, rows in self.below.items():
            sample.draw_below(node, rows)
        for node, tokens in self.ends.items():
            sample.draw_ends(node, tokens)
        ranks, given, gradients = self.ranks, self.graph.given(), self.graph.gradients
        places = {n for n, told in given.items() if told.kind == "places"}
        begins = [n for n in orders[0] if (n in leaves or n.op == "placeholder") and n not in places]
        with torch.set_grad_enabled(gradients):
            tensors = [n for n in begins if isinstance(n.meta["val"], Tensor)]
            drawn = {n: sample.draw(n, self.learns(n)) for n in tensors}
            sides = []
            # The graph may be one for ranks of other axes already, which have values of their own before.
            for order, node, at in zip(orders, nodes, (ranks.before, ranks), strict=True):
                start, copies = _begin(self.graph, at, order, drawn, sample)
                found = _run_by_oracle(order, node, start, sample, at)
                sides.append([("value", found), *_learned(found, drawn, copies, gradients)])
        each = ranks.count // ranks.before.count
        for (what, theirs), (_, ours) in zip(*sides, strict=True):
            yield from ((what, theirs[number // each], mine) for number, mine in enumerate(ours))


class WayChecks(_OnRanks):
    """The verdicts on other ways of computing what ranks compute. What they begin with may differ by rank, as
    do the parts of a sum that ranks add up. `own`: the values that do."""

    def __init__(
        self, graph: ProgramGraph, own: Collection[fx.Node], learns: Callable[[fx.Node], bool]
    ) -> None:
        super().__init__(graph, learns)
        self.own = own

    def about(self, node: fx.Node, order: Sequence[fx.Node]) -> bool:
        return node in self.own

    def _needed(self, order: Sequence[fx.Node], sizes: Mapping[str, int]) -> int:
        """Every rank has all values, and their gradients."""
        return 2 * self.ranks.count * bytes_in_float64(order, sizes)

    def _pairs(
        self, nodes: Two[fx.Node], orders: Two[Sequence[fx.Node]], leaves: frozenset[fx.Node], sample: Sample
    ) -> Iterable[Pair]:
        drawn = {n: self._drawn(n, sample) for order in orders for n in order if n in leaves}
        sides = [self._told(o, node, drawn, sample) for o, node in zip(orders, nodes, strict=True)]
        for number, (wanted, found) in enumerate(zip(*sides, strict=True)):
            yield "value" if number < self.ranks.count else "gradient", wanted, found

    def _drawn(self, node: fx.Node, sample: Sample) -> PerRank:
        """A copy for every rank: with values of its own, if the ranks' differ."""
        whole = sample.draw(node)
        own = node in self.own and whole.is_floating_point()
        copies = [whole * (1 + rank) if own else whole for rank in range(self.ranks.count)]
        learns = self.learns(node) and whole.is_floating_point()
        return PerRank(c.detach().clone().requires_grad_(learns) for c in copies)

    def _told(
        self, order: Sequence[fx.Node], node: fx.Node, drawn: Mapping[fx.Node, PerRank], sample: Sample
    ) -> list[Tensor]:
        """The value on every rank, and the gradient of each rank's copy of what they begin with."""
        with torch.set_grad_enabled(self.graph.gradients):
            start = {n: copies for n, copies in drawn.items() if n in order}
            values = _run_by_oracle(order, node, start, sample, self.ranks)
        inputs = [t for copies in drawn.values() for t in copies if t.requires_grad]
        gradients = _gradients_of_all(values, inputs, len(drawn)) if self.graph.gradients and inputs else ()
        return [*(v.detach() for v in values), *gradients]


def _run_by_oracle(
    order: Sequence[fx.Node], node: fx.Node, start: Mapping[fx.Node, Any], sample: Sample, ranks: Ranks
) -> PerRank:
    """A node's value on every rank."""
    (found,) = run_on_ranks(order, sample.known(order, start), (node,), sample.oracle.compute, ranks)
    return found if isinstance(found, PerRank) else PerRank([found] * ranks.count)


def _gradients_of_all(found: Sequence[Tensor], inputs: Sequence[Tensor], seed: int) -> Sequence[Tensor]:
    """The gradients of all ranks' results together, each weighted by the same random numbers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(found[0].shape, generator=generator, dtype=torch.float64)
    whole = torch.stack(list(found))
    return check.gradients(whole, weight.expand_as(whole), inputs)


def _learned(
    found: Sequence[Tensor], drawn: Mapping[fx.Node, Tensor], copies: Mapping[fx.Node, PerRank], learns: bool
) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """The gradients of what the ranks begin with: of every rank's own copy, and of its parts."""
    if not (learns and found[0].is_floating_point()):
        return
    inputs = {n: t for n, t in drawn.items() if t.requires_grad}
    flat = [t for n in inputs for t in (inputs[n], *copies.get(n, ()))]
    grads = iter(_gradients_of_all(found, flat, len(drawn)))
    for n in inputs:
        of_parts = next(grads)
        own = [next(grads) for _ in copies.get(n, ())] or [torch.zeros_like(of_parts)] * len(found)
        yield f"gradient for {n}", [of_parts + g for g in own]


def _begin(
    graph: ProgramGraph, ranks: Ranks, order: Sequence[fx.Node], given: Mapping[fx.Node, Tensor],
    sample: Sample,
) -> tuple[dict[fx.Node, Any], dict[fx.Node, PerRank]]:  # fmt: skip
    """What the ranks begin with, and their copies of every tensor that all ranks have whole: the gradient of
    such a tensor is the one that a rank has of its own copy."""
    placeholders = graph.given()
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
