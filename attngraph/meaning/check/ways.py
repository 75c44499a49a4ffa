"""Two ways in which the ranks of a graph compute one value, compared in float64.

One process runs both for all ranks (`ranks.py`). What they begin with may differ by rank, as do the parts of
a sum that ranks add up.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph import ProgramGraph, Ranks
from attngraph.meaning.check.check import TOLERANCE, Checks, Verdict, _gradients, _one_thread, rounding
from attngraph.meaning.check.comparison import compare, elementwise, largest
from attngraph.meaning.check.ranks import TOO_LARGE, PerRank, run_on_ranks
from attngraph.meaning.check.region import bytes_in_float64, region
from attngraph.meaning.check.sample import SMALLEST, Sample, choose_sizes


class WayChecks(Checks):
    """The verdicts on other ways of computing what ranks compute. `own`: the values that differ by rank;
    `learns` tells to which values gradients flow."""

    def __init__(
        self, graph: ProgramGraph, own: Collection[fx.Node], learns: Callable[[fx.Node], bool]
    ) -> None:
        super().__init__(graph)
        self.own, self.learns = own, learns

    def about(self, node: fx.Node, order: Sequence[fx.Node]) -> bool:
        return node in self.own

    def verdict(self, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node]) -> Verdict:
        ranks, needed = self.graph.ranks, self._bytes_needed(old, leaves, self.graph.hints)
        if ranks is not None and ranks.trusts is not None and needed > ranks.trusts:
            ranks.unproved += 1
            return Verdict(0.0, (), "")
        return self._compared(old, new, leaves)

    def _bytes_needed(self, old: fx.Node, leaves: Sequence[fx.Node], sizes: Mapping[str, int]) -> int:
        """Every rank has all values, and their gradients."""
        assert self.graph.ranks is not None
        return 2 * self.graph.ranks.count * bytes_in_float64(region((old,), leaves), sizes)

    @_one_thread()
    def _compared(self, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node]) -> Verdict:
        graph = self.graph
        assert graph.ranks is not None
        orders = region((old,), leaves), region((new,), leaves)
        begins = list(dict.fromkeys(n for order in orders for n in order if n in leaves))
        tolerance, worst = TOLERANCE + rounding(orders[0]), 0.0
        tried: list[dict[str, int]] = []
        for number, chosen in enumerate(choose_sizes(begins, graph.admits, graph.hints, SMALLEST)):
            at = {**graph.hints, **chosen}
            if self._bytes_needed(old, leaves, at) > budgets.CHECK_BYTES:
                return Verdict(worst, tuple(tried), TOO_LARGE)
            sample = Sample(graph.known_values(), at, number)
            drawn = {n: self._drawn(n, sample, graph.ranks) for n in begins}
            sides = [
                self._told(order, node, drawn, sample, graph.ranks)
                for order, node in zip(orders, (old, new), strict=True)
            ]
            tried.append(dict(chosen))
            for place, (wanted, found) in enumerate(zip(*sides, strict=True)):
                added = largest(wanted) if place >= graph.ranks.count else 0.0  # gradients come last
                result = compare(found, wanted, elementwise(tolerance, added))
                if not result.holds:
                    return Verdict(result.error, tuple(tried), f"it differs: {result}")
                worst = max(worst, result.error)
        return Verdict(worst, tuple(tried), "" if tried else "no small sizes are admitted")

    def _drawn(self, node: fx.Node, sample: Sample, ranks: Ranks) -> PerRank:
        """A copy for every rank: with values of its own, if the ranks' differ."""
        whole = sample.draw(node)
        own = node in self.own and whole.is_floating_point()
        copies = [whole * (1 + rank) if own else whole for rank in range(ranks.count)]
        learns = self.learns(node) and whole.is_floating_point()
        return PerRank(c.detach().clone().requires_grad_(learns) for c in copies)

    def _told(
        self, order: Sequence[fx.Node], node: fx.Node, drawn: Mapping[fx.Node, PerRank], sample: Sample,
        ranks: Ranks,
    ) -> list[Tensor]:  # fmt: skip
        """The value on every rank, and the gradient of each rank's copy of what they begin with."""
        with torch.set_grad_enabled(self.graph.gradients):
            start = {n: copies for n, copies in drawn.items() if n in order}
            (found,) = run_on_ranks(order, sample.known(order, start), (node,), sample.oracle.compute, ranks)
        values = found if isinstance(found, PerRank) else [found] * ranks.count
        inputs = [t for copies in drawn.values() for t in copies if t.requires_grad]
        if not (self.graph.gradients and inputs):
            return [v.detach() for v in values]
        together = torch.stack(list(values))
        generator = torch.Generator().manual_seed(len(drawn))
        weight = torch.randn(values[0].shape, generator=generator, dtype=torch.float64)
        gradients = _gradients(together, weight.expand_as(together), inputs)
        return [*(v.detach() for v in values), *gradients]
