"""Sizes of inputs that are equal in the example and multiply to the same number are taken to be equal.

Where a model flattens logits and labels, a trace only demands that rows times tokens are equal for both. The
graph is made one for calls in which both factors are; other calls are traced again.
"""

from typing import Any

import sympy

from attngraph.ir.graph.program_graph import ProgramGraph


def equate_factors(graph: ProgramGraph) -> None:
    """Replace conditions that products of sizes are equal by conditions that their factors are."""
    order = _order(graph)
    found: list[Any] = []
    for condition in graph.conditions:
        pairs = _pairs(condition, order, graph.hints) if isinstance(condition, sympy.Eq) else None
        found += [condition] if pairs is None else [sympy.Eq(a, b) for a, b in pairs]
    graph.conditions = tuple(c for c in found if c is not sympy.true)


def _order(graph: ProgramGraph) -> list[Any]:
    """The symbols of the inputs' sizes, in order of appearance."""
    values = (n.meta.get("val") for n in graph.placeholders())
    sizes = (s for value in values for s in getattr(value, "shape", ()) if not isinstance(s, int))
    return list(dict.fromkeys(symbol for s in sizes for symbol in s.node.expr.free_symbols))


def _pairs(condition: Any, order: list[Any], hints: dict[str, int]) -> list[tuple[Any, Any]] | None:
    """The factors of both sides that are equal in the example; None where there are others."""
    sides = []
    for side in condition.args:
        factors = sympy.Mul.make_args(side)
        if len(factors) < 2 or any(f not in order for f in factors):
            return None
        sides.append(sorted(factors, key=order.index))
    if len(sides[0]) != len(sides[1]):
        return None
    pairs = list(zip(*sides, strict=True))
    return pairs if all(hints.get(str(a)) == hints.get(str(b)) for a, b in pairs) else None
