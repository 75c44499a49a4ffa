"""Whether a token's value is computed from itself and earlier tokens alone: seen at many numbers of tokens.

The operations of a region are run with a shadow that says which tokens an element can follow from, whatever
the data are (`latest.py`), for sequences of 1, 2, ... tokens, and of more than the numbers in the operations
reach (`numbers.py`): what they do for so many, they do for more. At each length no token
may follow from a later one or from another sequence, and the numbers must be those that the longest sequence
begins with, so that nothing follows from how many tokens there are. `looks_back.py` shows the same by
algebra; what that does not follow is run here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph import described
from attngraph.meaning.check.comparison import compare
from attngraph.meaning.check.region import bytes_in_float64
from attngraph.meaning.check.sample import Sample
from attngraph.meaning.equal import steps_of, told
from attngraph.meaning.tokens.facts import Axes, Facts
from attngraph.meaning.tokens.latest import ALL, OF_WEIGHTS, Latest
from attngraph.meaning.tokens.latest_rules import tracking
from attngraph.meaning.tokens.low import is_chosen, may_be_low
from attngraph.meaning.tokens.numbers import reach
from attngraph.meaning.tokens.token_probe import EQUAL, ROWS, TokenProbe

_FEW = 1 << 12
"""Buffers of so many elements are equal if their values are, others if they are the same."""


class Region(NamedTuple):
    """The operations that compute a value, in the graph's order, and what they begin with, with its axes."""

    order: Sequence[fx.Node]
    leaves: Mapping[fx.Node, Axes]


@dataclasses.dataclass
class _Run:
    """A graph's operations on sequences of one length. `other`: a sequence whose tokens no other may see."""

    tokens: int
    other: int
    sample: Sample
    mode: Latest
    values: dict[fx.Node, Any]


class ManyLengths:
    """Trials of one graph. What was computed for one value serves for the next."""

    def __init__(self, facts: Facts, probe: TokenProbe) -> None:
        self.facts, self.space, self.probe = facts, facts.space, probe
        self._runs: dict[tuple[int, int], _Run] = {}
        self._drawn: dict[fx.Node, Tensor] = {}
        self._tokens = 0
        self._seen_of: dict[tuple[Any, ...], int] = {}
        """What was seen of values that are computed in such steps."""

    def longest(self, node: fx.Node, axes: Axes, region: Region) -> int:
        """Of how many tokens the longest of the sequences was for all of which a value with these axes looks
        back alone; 0 if it does not for one of them, or that cannot be seen."""

        def tell(each: fx.Node) -> Any:
            if each not in region.leaves:
                return told(each)
            values = self.probe.values.get(each)
            known = None if values is None else str(values.tolist()) if values.numel() <= _FEW else each
            low = may_be_low(self.facts, each), is_chosen(self.facts, each)
            return described(each.meta.get("val")), region.leaves[each], known, low

        steps = steps_of(node, lambda _, each: each in region.leaves, tell)
        equal = (axes, *(step for _, step in steps))
        if equal not in self._seen_of:
            self._seen_of[equal] = self._longest(node, axes, region)
        return self._seen_of[equal]

    def _longest(self, node: fx.Node, axes: Axes, region: Region) -> int:
        order, counted, admits = region.order, self.probe.counted, self.probe.graph.admits
        wanted = reach(order, self.probe.values, self.probe.of_sizes) + self.probe.tokens
        if self.space.is_of_one_length or not wanted <= budgets.PROBE_TOKENS:
            return 0
        most = max(self._tokens, self.probe.admitted(int(wanted)))
        bytes_of_one = bytes_in_float64(order, counted(ROWS, most)) if most else 0
        if not most or bytes_of_one > budgets.PROBE_BYTES:
            return 0
        if most > self._tokens:
            self._tokens, self._runs, self._drawn = most, {}, {}
        lengths = [n for n in range(1, most) if admits(counted(ROWS, n))]
        few = 2 * budgets.PROBE_BYTES // max(bytes_of_one, 1)
        half = min(max(few, 4), budgets.TRIED_LENGTHS) // 2
        lengths = [*lengths[:half], *lengths[max(half, len(lengths) - half) :]]
        place = axes.index((self.space.token,))
        try:
            whole = self._seen(node, axes, self._run(region, most, 1))
            if whole is None or self._seen(node, axes, self._run(region, most, 0)) is None:
                return 0
            for tokens in lengths:
                found = self._seen(node, axes, self._run(region, tokens, 1))
                if found is None or not compare(found, whole.narrow(place, 0, tokens), EQUAL).holds:
                    return 0
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            return 0  # it cannot be run for such sizes
        return most

    def _seen(self, node: fx.Node, axes: Axes, run: _Run) -> Tensor | None:
        """The value in a run; None where a token follows from a later one, or from one of the sequence
        `other`."""
        value, place, row = run.values[node], axes.index((self.space.token,)), axes.index((self.space.row,))  # type: ignore[arg-type]
        within = run.mode.of(value) <= _places(run.tokens, place, value.ndim)
        return value if bool(within.select(row, 1 - run.other).all()) else None

    def _run(self, region: Region, tokens: int, other: int) -> _Run:
        """The run of sequences of one length, in which a region has been computed."""
        if (tokens, other) not in self._runs:
            sample = Sample(self.probe.values, self.probe.counted(ROWS, tokens), 0)
            self._runs[tokens, other] = _Run(tokens, other, sample, tracking(), {})
        run = self._runs[tokens, other]
        values = run.sample.known(region.order, run.values)
        with torch.no_grad():
            values |= {
                n: self._told(run, n, axes) for n, axes in region.leaves.items() if n not in run.values
            }
            with run.mode:
                for node in (n for n in region.order if n not in values):
                    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = run.sample.oracle.compute(node, args, kwargs)
        run.mode.forget_but(values.values())
        run.values = values
        return run

    def _told(self, run: _Run, leaf: fx.Node, axes: Axes) -> Tensor:
        """What is drawn for a value, the same tokens at each length, with what its elements follow from."""
        if leaf not in self._drawn:
            longest = Sample(self.probe.values, self.probe.counted(ROWS, self._tokens), 0)
            self._drawn[leaf] = longest.draw(leaf)
        value = self._drawn[leaf]
        if not any(axes):
            return value if leaf in self.probe.values else run.mode.tell(value, OF_WEIGHTS)
        place, row = (self.space.place(axes, v) for v in (self.space.token, self.space.row))
        latest = torch.zeros(())
        if place is not None:
            value = value.narrow(place, 0, run.tokens).clone()
            latest = _places(run.tokens, place, value.ndim)
        latest = latest.expand(value.shape).clone()
        if row is not None:
            latest.select(row, run.other).fill_(ALL)
        run.mode.tell_lowered(value, may_be_low(self.facts, leaf))
        if is_chosen(self.facts, leaf):
            run.mode.tell_chosen(value)
        return run.mode.tell(value, latest)


def _places(tokens: int, dim: int, rank: int) -> Tensor:
    """The numbers of tokens along a dimension."""
    return torch.arange(float(tokens)).reshape([-1 if d == dim else 1 for d in range(rank)])
