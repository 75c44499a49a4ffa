"""Equal layers are checked once: the verdicts on one graph's claims, cached by what the claims compute."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.meaning.check import check
from attngraph.meaning.check.region import fingerprint, region


class Checks:
    """The verdicts so far."""

    def __init__(self, graph: ProgramGraph) -> None:
        self.graph = graph
        self.verdicts: dict[Any, check.Verdict] = {}
        self._contents: list[Tensor] = []

    def same_value(self, old: fx.Node, new: fx.Node, leaves: Iterable[fx.Node]) -> check.Verdict:
        """Whether `new` equals `old` as functions of `leaves`."""
        leaves, values = list(dict.fromkeys(leaves)), self.graph.known_values()
        order = region((old, new), leaves)
        begins = [n for n in order if n in leaves or n.op == "placeholder"]
        told = {n: self._content(values[n]) if n in values else self.about(n, order) for n in begins}
        key = fingerprint(order, told)
        if key not in self.verdicts:
            self.verdicts[key] = self.verdict(old, new, leaves)
        return self.verdicts[key]

    def about(self, node: fx.Node, order: Sequence[fx.Node]) -> Any:
        """What is known of a value that a claim begins with, besides dtype and shape."""
        return None

    def verdict(self, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node]) -> check.Verdict:
        return check.same_value(self.graph, old, new, leaves)

    def _content(self, tensor: Tensor) -> int:
        """A number that is equal for tensors of equal contents."""
        for place, other in enumerate(self._contents):
            if other.dtype == tensor.dtype and other.shape == tensor.shape and torch.equal(other, tensor):
                return place
        self._contents.append(tensor)
        return len(self._contents) - 1
