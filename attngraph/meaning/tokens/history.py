"""Values that are computed from all earlier tokens by operations that are no attention and no sum known here:
attention under a mask that data choose, scores mixed between heads, weights that are no softmax.

What such a value is computed from is kept for every token, and the model's own operations run on all of it
again. That takes as long as the whole sequence does, for this part of the model alone; so this is the last
resort. That no token sees a later one is shown by algebra (`looks_back.py`).
"""

import dataclasses
from collections.abc import Mapping

from torch import Tensor, fx

from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import is_size
from attngraph.ir.ops import nodes
from attngraph.meaning.tokens.facts import Axes, Fact, Kind, Scan, Space, read_in
from attngraph.meaning.tokens.looks_back import LooksBack, NotShown, OfAll
from attngraph.meaning.tokens.token_probe import TokenProbe

_GIVEN = (Kind.FIXED, Kind.TOKEN, Kind.ATTENTION, Kind.SCAN)


@dataclasses.dataclass(frozen=True)
class History(Scan):
    """A value that is computed from all earlier tokens of others, by the model's own operations.

    `operands`: the values that are read at earlier tokens. `region`: the operations between them and the
    value, in the graph's order.
    """

    region: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...] = ()
    reason = "computed anew from all earlier tokens"

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        return read_in(self.region)


class HistoryFinder:
    """Looks for values of one graph that are computed from all earlier tokens. `why_not`: why that could not
    be shown of those that were looked at in vain; `assumed`: of those that are taken to be such values
    because the user says so (`assume_causal`)."""

    def __init__(
        self, space: Space, facts: Mapping[fx.Node, Fact], probe: TokenProbe, looks_back: LooksBack,
        assume_causal: bool,
    ) -> None:  # fmt: skip
        self.space, self.facts, self.probe, self.looks_back = space, facts, probe, looks_back
        self.assume_causal = assume_causal
        self.why_not: dict[fx.Node, str] = {}
        self.assumed: dict[fx.Node, str] = {}
        self._of_all: set[fx.Node] = set()
        """Values for which a sum over all tokens is in the way, and what is computed from them."""

    def find(self, node: fx.Node, axes: Axes) -> History | None:
        """How a value with these axes is computed from all earlier tokens of others; None if it is not."""
        space, facts, probe = self.space, self.facts, self.probe
        if not self._of_all.isdisjoint(node.all_input_nodes):
            self._of_all.add(node)
        if (node in self._of_all and not self.assume_causal) or not _stands_alone(space, axes):
            return None
        given = {n: f.axes for n, f in facts.items() if self._is_given(n, f)}
        order, leaves = probe.region(node, given)
        operands = [n for n in leaves if n in facts and space.place(facts[n].axes, space.token) is not None]
        inner = tuple(n for n in order if n not in leaves and not is_size(n))
        if (
            not operands
            or len(inner) > budgets.PROBE_NODES
            or not any(_is_of_pairs(space, probe, n) for n in inner)
        ):
            return None
        for leaf in leaves:
            known = facts.get(leaf)
            if known is None or (leaf in operands) != any(known.axes) or not _stands_alone(space, known.axes):
                return None
        try:
            self.looks_back.require(node, axes)
        except NotShown as why_not:
            if isinstance(why_not, OfAll):
                self._of_all.add(node)
            (self.assumed if self.assume_causal else self.why_not)[node] = str(why_not)
            if not self.assume_causal:
                return None
        return History(inner, tuple(operands))

    def _is_given(self, node: fx.Node, fact: Fact) -> bool:
        """Whether a value is kept, or fixed. What follows from sizes and places alone is computed anew, as
        views are in which rows and tokens are not dimensions of their own."""
        if fact.kind not in _GIVEN or isinstance(fact.scan, History):
            return False
        return _stands_alone(self.space, fact.axes) and not self.looks_back.of_sizes(node)


def _stands_alone(space: Space, axes: Axes) -> bool:
    """Whether row and token are dimensions of their own, the rows first; or neither is there."""
    places = [axes.index((v,)) if (v,) in axes else None for v in (space.row, space.token)]
    return not any(axes) or (space.row is not None and places[0] == 0 and places[1] is not None)


def _is_of_pairs(space: Space, probe: TokenProbe, node: fx.Node) -> bool:
    """Whether a value has an entry for each pair of tokens, or is computed from such within one operation."""
    if nodes.whole(node) is not None:
        return True
    value = node.meta.get("val")
    return isinstance(value, Tensor) and sum(space.counts_tokens(n) for n in probe.extents(node)) > 1
