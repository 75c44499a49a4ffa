"""How much float64 itself rounds in a claim, which the check allows besides its tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from attngraph.ir.language import expr as E
from attngraph.ir.language.score import Keep, Score
from attngraph.ir.ops import nodes

LARGEST_SUM = 1e10
"""A number of this size, added to all scores of a row, leaves six of their digits in float64; with a larger
one, sums in two different orders cannot be compared."""


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
            for read in (n for n in E.walk(product) if n.op == "read"):
                tensor = whole.reads[read.value]
                found[tensor] = max([found.get(tensor, 0.0), *numbers])
    return found
