"""What is written otherwise before tokens are divided.

- Sizes of inputs that are equal in the example and multiply to the same number are taken to be equal. Where a
  model flattens logits and labels, a trace only demands that rows times tokens are equal for both. The graph
  is made one for calls in which both factors are; other calls are traced again.
- Sizes are those of inputs: a value that is measured would be needed whole.
- The mean of tokens' losses is a sum of losses over their number. Each rank then computes the losses of its
  own tokens, and what is gathered is one number for each token, not the logits of all.
"""

import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from attngraph.ir.graph import ProgramGraph, arguments, is_measured, is_size
from attngraph.meaning.check.check import Checks
from attngraph.passes.canonicalize import is_of_value, measure_input
from attngraph.passes.proposal import Proposal

aten = torch.ops.aten
_CROSS_ENTROPY = aten.cross_entropy_loss.default
_NONE, _MEAN, _SUM = range(3)
"""PyTorch's numbers of reductions."""
_EXACT = (torch.float32, torch.float64)
"""In other dtypes the losses of tokens would be rounded before they are added."""


def equate_factors(graph: ProgramGraph) -> None:
    """Replace conditions that products of sizes are equal by conditions that their factors are."""
    values = (n.meta.get("val") for n in graph.placeholders())
    sizes = (s for value in values for s in getattr(value, "shape", ()) if not isinstance(s, int))
    order = list(dict.fromkeys(symbol for s in sizes for symbol in s.node.expr.free_symbols))
    found: list[Any] = []
    for condition in graph.conditions:
        pairs = _pairs(condition, order, graph.hints) if isinstance(condition, sympy.Eq) else None
        found += [condition] if pairs is None else [sympy.Eq(a, b) for a, b in pairs]
    graph.conditions = tuple(c for c in found if c is not sympy.true)


def _pairs(condition: Any, order: list[Any], hints: dict[str, int]) -> list[tuple[Any, Any]] | None:
    """The factors of both sides that are equal in the example; None where there are others. `order`: the
    symbols of the inputs' sizes, in order of appearance."""
    sides = [sympy.Mul.make_args(side) for side in condition.args]
    counts = {len(factors) for factors in sides}
    if len(counts) > 1 or 1 in counts or any(f not in order for factors in sides for f in factors):
        return None
    pairs = list(zip(*(sorted(factors, key=order.index) for factors in sides), strict=True))
    return pairs if all(hints.get(str(a)) == hints.get(str(b)) for a, b in pairs) else None


def measure_inputs(graph: ProgramGraph) -> None:
    """Let sizes be those of inputs."""
    for node in list(graph.graph.nodes):
        if is_of_value(node) and not is_measured(node):
            measure_input(graph, node)
    graph.clean()


def sum_losses(graph: ProgramGraph) -> None:
    """Write cross entropies as sums of tokens' losses, where that is proved to be the same."""
    checks = Checks(graph)
    for node in list(graph.graph.nodes):
        if node.target is not _CROSS_ENTROPY or node.meta["val"].dtype not in _EXACT:
            continue
        given = arguments(node)
        if given["weight"] is not None or given["target"].meta["val"].is_floating_point():
            continue
        if given["reduction"] in (_MEAN, _SUM):
            with Proposal(graph, node, checks) as proposal:
                found = proposal.trace(functools.partial(_summed, tuple(given)), *given.values())
                proposal.replace(node, found, [n for n in node.all_input_nodes if not is_size(n)])
    graph.clean()


def _summed(names: Sequence[str], *values: Any) -> Any:
    """The loss as a sum."""
    given = dict(zip(names, values, strict=True))
    losses = _CROSS_ENTROPY(*{**given, "reduction": _NONE}.values())
    total = losses.sum()
    if given["reduction"] == _SUM:
        return total
    return total / aten.ne.Scalar(given["target"], given["ignore_index"]).sum().to(losses.dtype)
