"""Is a claim true? Two values of one graph, computed in float64 on random inputs and compared.

The region between two nodes and the tensors that both are computed from is run on its own, with every
floating dtype widened to float64 so that a wrong scale cannot hide in a tolerance, at more than one size.
Where sizes are fixed and large, they are computed in part (`parts.py`): at the first, the last and random
places of some dimensions, that of the queries before all. Where gradients flow they are compared as well. At
the first size both are computed once more in float32, because the claim may lose digits that the model keeps.

Equal layers are checked once: verdicts are kept by what the claims compute.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.errors import VerificationError
from attngraph.ir import budgets
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language import E, Keep, Score
from attngraph.ir.ops import nodes
from attngraph.meaning.check.comparison import compare, elementwise, largest
from attngraph.meaning.check.parts import Box, choose_box
from attngraph.meaning.check.region import bytes_in_float64, fingerprint, region, with_makers_of_sizes
from attngraph.meaning.check.sample import SMALLEST, Sample, choose_sizes

TOLERANCE = 1e-10
"""Largest accepted difference, relative to 1 + |value|, in float64."""
LARGEST_SUM = 1e10
"""A number of this size, added to all scores of a row, leaves six of their digits in float64; with a larger
one, sums in two different orders cannot be compared."""


Pair = tuple[str, Tensor, Tensor]
"""What is compared: its name ("value", or of a gradient), what it should be, and what it is."""


class TooLarge(Exception):
    """What is to be compared takes too many bytes."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether two values agree: the largest error, the sizes tried, and what went wrong if not."""

    error: float
    sizes: tuple[dict[str, int], ...]
    problem: str = ""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: sampled tensors are so small that waking others for each op takes longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def same_value(graph: ProgramGraph, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node]) -> Verdict:
    """Whether `new` equals `old` as functions of `leaves`, for random values of these, at two choices of
    sizes. The sizes of the example are tried where the model runs at none of the others."""
    leaves = with_makers_of_sizes((old, new), leaves)
    order = region((old, new), leaves)
    box: Box = ()

    def pairs(sample: Sample) -> Iterator[Pair]:
        nonlocal box
        box, needed = choose_box(order, (old, new), leaves, sample.sizes, sample.generator)
        if needed > budgets.CHECK_BYTES:
            raise TooLarge
        given = {leaf: sample.draw(leaf, graph.gradients) for leaf in leaves}
        with torch.set_grad_enabled(graph.gradients):
            both = sample.evaluate(order, given, old, new, box=box)
            yield "value", *both
            if graph.gradients:
                inputs = {n: t for n, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
                weight = torch.randn(both[0].shape, generator=sample.generator, dtype=torch.float64)
                grads = [gradients(result, weight, list(inputs.values())) for result in both]
                yield from ((f"gradient for {n}", a, b) for n, a, b in zip(inputs, *grads, strict=True))

    def drowned(sample: Sample, exact: Tensor) -> str:
        narrow = sample.in_float32()
        try:
            with torch.no_grad():
                given = {leaf: narrow.draw(leaf) for leaf in leaves}
                found = narrow.evaluate(order, given, new, old, box=box)
        except RuntimeError:  # a constant beyond the range of float32: the model itself does not run in it
            return ""
        return _drowned(exact, *found)

    sizes = choose_sizes(leaves, graph.admits, graph.hints)
    if bytes_in_float64(order, {**graph.hints, **dict(*sizes[-1:])}) > budgets.SAMPLE_BYTES:
        # Most sizes are the model's own and large: the others are as small as can be.
        sizes = choose_sizes(leaves, graph.admits, graph.hints, SMALLEST)
    steep = {f"gradient for {leaf}": factor for leaf, factor in factors(order).items()}
    return compared(graph, sizes, TOLERANCE + rounding(order), pairs, steep, drowned)


@_one_thread()
def compared(
    graph: ProgramGraph, sizes: Sequence[Mapping[str, int]], tolerance: float,
    pairs: Callable[[Sample], Iterable[Pair]], steep: Mapping[str, float] = MappingProxyType({}),
    at_first: Callable[[Sample, Tensor], str] = lambda sample, exact: "",
) -> Verdict:  # fmt: skip
    """Whether each of `pairs` is equal at these sizes; at those of the example where it cannot be computed at
    any of them.

    Args:
        steep: what is added to the largest element of a gradient, for the error that is accepted.
        at_first: what else is wrong, asked once of the first sample and of its first value.
    """
    worst, problem = 0.0, ""
    tried: list[dict[str, int]] = []
    for number, chosen in enumerate((*sizes, graph.hints)):
        if number == len(sizes) and tried:
            break
        # Some operands contribute only a dtype: their sizes are not chosen.
        sample = Sample(graph.known_values(), {**graph.hints, **chosen}, number)
        try:
            found = list(pairs(sample))
        except TooLarge:
            return Verdict(worst, tuple(tried), "too large to be checked in float64 at its fixed sizes")
        except (IndexError, RuntimeError, ValueError) as cause:
            # For example, a table is read beyond its end: the model does not allow these sizes together.
            problem = f"cannot be run at small sizes: {cause}"
            continue
        tried.append(dict(chosen))
        for what, wanted, value in found:
            # Where terms cancel, the rounding error of a gradient is that of its largest elements.
            added = 0.0 if what == "value" else largest(wanted) + steep.get(what, 0.0)
            result = compare(value, wanted, elementwise(tolerance, added))
            if not result.holds:
                shown = ", ".join(f"{k}={v}" for k, v in chosen.items())
                return Verdict(result.error, tuple(tried), f"its {what} differs at sizes ({shown}): {result}")
            worst = max(worst, result.error)
        if len(tried) == 1 and (problem := at_first(sample, found[0][1])):
            return Verdict(worst, tuple(tried), problem)
    return Verdict(worst, tuple(tried), "" if tried else problem)


def rounding(order: Sequence[fx.Node]) -> float:
    """The rounding error of scores in float64 where a mask subtracts a number from a whole row: the model may
    add masks and biases in another order."""
    found = [v for v in map(nodes.view, order) if isinstance(v, nodes.Attention)]
    fills = [s.fill for v in found for s in v.program.statements if isinstance(s, Keep)]
    added = [abs(n.value) for f in fills if f.op != "const" for n in E.walk(f) if n.op == "const"]
    return 4 * torch.finfo(torch.float64).eps * max((x for x in added if x <= LARGEST_SUM), default=0.0)


def factors(order: Sequence[fx.Node]) -> dict[fx.Node, float]:
    """The largest number by which the scores multiply each tensor that they read (a mask, mostly): its
    gradient is as many times that of the scores, rounding included."""
    found: dict[fx.Node, float] = {}
    for whole in (v for v in map(nodes.view, order) if isinstance(v, nodes.Attention)):
        scores = [s.value for s in whole.program.statements if isinstance(s, Score)]
        for product in (n for score in scores for n in E.walk(score) if n.op == "mul"):
            numbers: list[Any] = [abs(n.value) for n in product.args if n.op == "const" and n is not E.NAN]
            numbers = [number for number in numbers if number <= LARGEST_SUM]
            for read in E.reads(product):
                tensor = whole.reads[read.value]
                found[tensor] = max([found.get(tensor, 0.0), *numbers])
    return found


def _drowned(exact: Tensor, found: Tensor, own: Tensor) -> str:
    """What is wrong with a new value in float32, if its error is far larger than that of the model's `own`.
    (Where only one of them is NaN or infinite, one way of writing the function exceeds the range of
    float32.)"""
    if not exact.is_floating_point() or not exact.numel():
        return ""
    wanted = torch.nan_to_num(exact.detach(), 0.0, 0.0, 0.0)
    error, theirs = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0).sub(wanted).abs() for t in (found, own))
    slack = 32 * torch.finfo(torch.float32).eps * wanted.abs().max()
    # The model's own error may be large in a few places, where all keys are masked, say.
    for of in (torch.max, torch.median):
        mine, own = of(error), of(theirs)
        if mine > 8 * own + slack:
            return f"in float32 its error is {float(mine):.1e}, the model's own is {float(own):.1e}"
    return ""


def gradients(result: Tensor, weight: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients of a random combination of the finite results; zeros where none flows."""
    if not result.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    finite = torch.where(result.isfinite(), result, torch.zeros_like(result))
    total = (finite * weight).sum()
    # The graph is kept: both values may be computed from parts of one tensor.
    return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)


class Checks:
    """The verdicts so far."""

    def __init__(self, graph: ProgramGraph) -> None:
        self.graph = graph
        self.verdicts: dict[Any, Verdict] = {}
        self._contents: list[Tensor] = []

    def same_value(self, old: fx.Node, new: fx.Node, leaves: Iterable[fx.Node]) -> Verdict:
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

    def verdict(self, old: fx.Node, new: fx.Node, leaves: Sequence[fx.Node]) -> Verdict:
        return same_value(self.graph, old, new, leaves)

    def _content(self, tensor: Tensor) -> int:
        """A number that is equal for tensors of equal contents."""
        for place, other in enumerate(self._contents):
            if other.dtype == tensor.dtype and other.shape == tensor.shape and torch.equal(other, tensor):
                return place
        self._contents.append(tensor)
        return len(self._contents) - 1


def require_same_results(before: ProgramGraph, after: ProgramGraph) -> None:
    """Check that both graphs give the same results for random inputs, in float64, with gradients where they
    are recorded.

    Raises:
        VerificationError: they do not, or take other inputs, or have another number of results.
    """
    both = before.copy()
    given = {node.name: node for node in both.placeholders()}
    new = [node.name for node in after.placeholders() if node.name not in given]
    if new or len(before.results()) != len(after.results()):
        what = new or "its number of results"
        raise VerificationError(f"what cannot be compared with the graph before: {what}")
    known: dict[fx.Node, fx.Node] = {node: given[node.name] for node in after.placeholders()}
    with both.graph.inserting_before(both.graph.output_node()):
        for node in after.graph.nodes:
            if node.op not in ("placeholder", "output"):
                known[node] = both.graph.node_copy(node, known.__getitem__)
                known[node].meta = dict(node.meta)
    for place, (old, found) in enumerate(zip(both.results(), after.results(), strict=True)):
        if isinstance(old, fx.Node) and isinstance(old.meta.get("val"), Tensor):
            verdict = same_value(both, old, known[found], both.placeholders())
            if verdict.problem:
                problem = f"result {place} is not what it was before the pass: {verdict.problem}"
                raise VerificationError(problem)
