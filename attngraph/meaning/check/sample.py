"""What a claim is tested with: numbers for the symbolic sizes, random tensors for everything else.

Small sizes, normal numbers, small integers (bytes of all values), and booleans. Every other sample's booleans
have a first row that is all true and a last one that is all false; the last row of the others is true at its
last place alone, as a mask is that hides all keys but one.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import is_size, measured_sizes
from attngraph.meaning.algebra.sizes import evaluate_size, size_expression
from attngraph.meaning.check.oracle import Oracle
from attngraph.meaning.check.parts import Box, Parts
from attngraph.meaning.check.region import shape_at

DIFFERENT = ((3, 5, 7, 2, 4, 6, 8, 16), (17, 13, 19, 12, 16, 10, 24, 32))
SMALLEST = ((2, 3, 4, 5, 6, 8, 16), (3, 2, 4, 5, 6, 8, 16))


class Sample:
    """One assignment of sizes, and what is drawn at it.

    Args:
        values: known tensors by placeholder (buffers), used as they are.
        sizes: a number for every symbolic size.
        number: the number of this sample: its seed, which also decides what alternates between samples.
    """

    def __init__(
        self, values: Mapping[fx.Node, Tensor], sizes: Mapping[str, int], number: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        self.values, self.sizes, self.number = values, sizes, number
        self.generator = torch.Generator().manual_seed(number)
        self.oracle = Oracle(dtype, torch.device("cpu"), number)
        self._drawn: dict[fx.Node, Tensor] = {}

    def in_float32(self) -> "Sample":
        """The same sample, computed in float32."""
        found = Sample(self.values, self.sizes, self.number, torch.float32)
        found._drawn = self._drawn
        return found

    def draw(self, node: fx.Node, gradients: bool = False) -> Any:
        """A tensor for a node that is not computed here, always the same; the known one if there is one.
        A number is the one that the sizes say."""
        if is_size(node):
            return evaluate_size(size_expression(node.meta["val"]), self.sizes)
        if node in self.values:
            return self.oracle.widened(self.values[node])  # type: ignore[no-any-return]
        if node not in self._drawn:
            self._drawn[node] = self._random(node.meta["val"])
        drawn: Tensor = self.oracle.widened(self._drawn[node])
        return drawn.detach().requires_grad_() if gradients and drawn.is_floating_point() else drawn

    def draw_below(self, node: fx.Node, limit: int) -> None:
        """Draw integers from 0 to below `limit` for a node."""
        value = node.meta["val"]
        shape = shape_at(value, self.sizes)
        self._drawn[node] = torch.randint(0, limit, shape, generator=self.generator, dtype=value.dtype)

    def draw_ends(self, node: fx.Node, tokens: fx.Node) -> None:
        """Draw for a node where each of several runs of tokens ends; some may be empty."""
        value, total = node.meta["val"], shape_at(tokens.meta["val"], self.sizes)[0]
        shape = shape_at(value, self.sizes)
        found = torch.randint(0, total + 1, shape, generator=self.generator).sort().values
        found[..., -1] = total
        self._drawn[node] = found.to(value.dtype)

    def _random(self, value: Tensor) -> Tensor:
        shape = shape_at(value, self.sizes)
        if value.dtype == torch.bool:
            drawn = torch.rand(shape, generator=self.generator) < 0.7
            if self.number % 2 and drawn.ndim and shape[0] > 1:
                drawn[0], drawn[-1] = True, False
            elif not self.number % 2 and drawn.ndim and drawn.numel():
                last = drawn[-1] if drawn.ndim > 1 else drawn
                last[..., :-1], last[..., -1] = False, True
            return drawn
        if value.is_complex():
            return torch.randn(shape, generator=self.generator, dtype=torch.complex128)
        if value.dtype == torch.int8:  # no index has this dtype
            return torch.randint(-128, 128, shape, generator=self.generator, dtype=value.dtype)
        if not value.is_floating_point():
            return torch.randint(0, 2, shape, generator=self.generator, dtype=value.dtype)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def evaluate(
        self, order: Sequence[fx.Node], given: Mapping[fx.Node, Any], *wanted: fx.Node, box: Box = ()
    ) -> list[Any]:
        """The values of the wanted nodes, or of one part of each, by the oracle."""
        known = self.known(order, given)
        if not any(box):
            return self.oracle.evaluate(order, known, wanted)
        return Parts(known, self.sizes).evaluate(self.oracle, known, [(node, box) for node in wanted])

    def known(self, order: Sequence[fx.Node], given: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """What is given, with the sizes and the inputs that it lacks."""
        known = dict(given)
        chosen = {size for node in given for size in measured_sizes(node)}
        for node in order:
            if node not in known and is_size(node) and measured_sizes(node) <= chosen:
                known[node] = evaluate_size(size_expression(node.meta["val"]), self.sizes)
            elif node not in known and node.op == "placeholder":
                known[node] = self.draw(node)
        return known


def choose_sizes(
    nodes: Iterable[fx.Node], admissible: Callable[[Mapping[str, int]], bool], example: Mapping[str, int],
    candidates: Sequence[tuple[int, ...]] = DIFFERENT,
) -> list[dict[str, int]]:  # fmt: skip
    """Two assignments of small, different numbers to every symbolic size of `nodes` that satisfy the
    trace's assumptions. If there is only one, it is given twice, to be tested with other values.

    Args:
        candidates: the numbers for each assignment, in order of preference.
    """
    names: dict[str, None] = {}
    for node in nodes:
        value = node.meta.get("val")
        for extent in value.shape if isinstance(value, Tensor) else (value,):
            if isinstance(extent, torch.SymInt):
                names.update((str(s), None) for s in extent.node.expr.free_symbols)
    if not names:
        return [{}, {}]
    found: list[dict[str, int]] = []
    for numbers in candidates:
        tries = itertools.islice(itertools.product(numbers, repeat=len(names)), 5000)
        distinct = sorted(tries, key=lambda c: -len(set(c)))
        for choice in distinct:
            assignment = dict(zip(names, choice, strict=True))
            if admissible({**example, **assignment}):
                found.append(assignment)
                break
    return found * 2 if len(found) == 1 else found
