"""Values that are computed from all earlier tokens by operations that are no attention and no sum known here:
attention under a mask that data choose, scores mixed between heads, weights that are no softmax.

What such a value is computed from is kept for every token, and the model's own operations run on all of it
again. That takes as long as the whole sequence does, for this part of the model alone; so this is the last
resort. That no token sees a later one is tested (`token_probe.py`): whatever a sequence begins with has the
results that it has alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from attngraph.ir.graph.program_graph import is_size, operands_first
from attngraph.ir.ops import nodes
from attngraph.meaning.tokens.axes import Axes, Space
from attngraph.meaning.tokens.facts import Fact, History, Kind
from attngraph.meaning.tokens.token_probe import TokenProbe

_GIVEN = (Kind.FIXED, Kind.TOKEN, Kind.ATTENTION, Kind.SCAN)


class HistoryFinder:
    """Looks for values of one graph that are computed from all earlier tokens."""

    def __init__(self, space: Space, probe: TokenProbe) -> None:
        self.space, self.probe = space, probe
        self._of_sizes: dict[fx.Node, bool] = {}

    def find(self, facts: Mapping[fx.Node, Fact], node: fx.Node, axes: Axes) -> History | None:
        """How a value with these axes is computed from all earlier tokens of others; None if it is not."""
        space, probe = self.space, self.probe
        if not _stands_alone(space, axes):
            return None
        given = {n: f.axes for n, f in facts.items() if self._is_given(n, f)}
        order, leaves = probe.region(node, given)
        operands = [n for n in leaves if n in facts and space.place(facts[n].axes, space.token) is not None]
        inner = tuple(n for n in order if n not in leaves and not is_size(n))
        if not operands or not any(_is_of_pairs(space, probe, n) for n in inner):
            return None
        if any(n in facts and facts[n].causality is not None for n in inner):
            return None  # an attention whose mask is known to show later tokens
        for leaf in leaves:
            known = facts.get(leaf)
            if known is None or (leaf in operands) != any(known.axes) or not _stands_alone(space, known.axes):
                return None
        return History(tuple(operands), inner) if probe.is_causal(node, axes, given) else None

    def _is_given(self, node: fx.Node, fact: Fact) -> bool:
        """Whether a value is kept, or fixed. What follows from sizes and places alone is computed anew, as
        views are in which rows and tokens are not dimensions of their own."""
        if fact.kind not in _GIVEN or isinstance(fact.scan, History):
            return False
        return _stands_alone(self.space, fact.axes) and not self._is_of_sizes(node)

    def _is_of_sizes(self, node: fx.Node) -> bool:
        """Whether a value is computed from sizes alone."""
        for step in operands_first([node], lambda n: () if n in self._of_sizes else n.all_input_nodes):
            if step not in self._of_sizes:
                inputs = step.all_input_nodes
                self._of_sizes[step] = is_size(step) or (
                    step.op != "placeholder" and all(self._of_sizes[n] for n in inputs)
                )
        return self._of_sizes[node]


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
