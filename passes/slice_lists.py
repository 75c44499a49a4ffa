"""Picking places that follow each other is a slice.

Matches `x[:, [-2]]`, `x[:, torch.arange(4, 8)]` and `index_select` where the list's formula says that its
places are equally far apart: the result is a copy of a slice. Passes that divide, join or repeat movements
know slices; a pick by a list is an operation of its own to them. Used by `canonicalize`. Left alone: several
lists at once, lists of several dimensions, places that data decide or that go backwards, a result of another
layout, and dimensions of which the trace does not know that the places are in range (there a pick raises an
error, a slice none).
"""

from collections import Counter
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph, op_name
from attngraph.ir.language import expr as E
from attngraph.meaning import M, Meaning, Unliftable
from attngraph.meaning.rules.movement import is_mask
from attngraph.passes.build import Refused
from attngraph.passes.proposal import Proposal

aten = torch.ops.aten
PICKS = (aten.index.Tensor, aten.index_select.default)


def slice_lists(graph: ProgramGraph) -> Counter[str]:
    """Replace every such pick of a graph; how many of each operation there were."""
    found: Counter[str] = Counter()
    meaning: Meaning | None = None
    for node in list(graph.graph.nodes):
        if node.target not in PICKS:
            continue
        meaning = meaning or Meaning.of(graph)
        cut = _cut(meaning, node)
        if cut is None:
            continue
        with Proposal(graph, node) as proposal:
            part = proposal.call(aten.slice.Tensor, node.args[0], *cut)
            made = proposal.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            if made.meta["val"].stride() != node.meta["val"].stride():
                raise Refused("a result of another layout")
            proposal.replace(node, made)
        if proposal.done:
            found[op_name(node)] += 1
    return found


def _cut(meaning: Meaning, node: fx.Node) -> tuple[int, int, int, int] | None:
    """The dimension, the first place, the end and the step of the slice that a pick is."""
    args: Any = node.args
    is_one = node.target is aten.index_select.default
    lists = [(args[1], args[2])] if is_one else [(d, p) for d, p in enumerate(args[1]) if p is not None]
    source, ((dim, pick), *others) = args[0], lists
    extent = source.meta["val"].shape[dim]
    if others or is_mask(pick) or pick.meta["val"].ndim != 1 or not isinstance(extent, int):
        return None
    try:
        (count,) = meaning.shape(pick)
        place = E.var("i", count)
        formula = meaning.index_expression(pick, (place if count is not E.ONE else E.ZERO,))
    except Unliftable:
        return None
    if formula is None or count.op != "const" or count.value == 0:
        return None
    first = M.substitute(formula, {place: E.ZERO})
    step, rest = M.coefficient(M.sub(formula, first))
    if first.op != "const" or (count.value > 1 and (rest is not place or step < 1)):
        return None
    step = int(step) if count.value > 1 else 1
    begin = int(first.value) + (extent if first.value < 0 else 0)
    end = begin + step * (int(count.value) - 1) + 1
    passes_zero = first.value < 0 <= int(first.value) + step * (int(count.value) - 1)
    return None if begin < 0 or end > extent or passes_zero else (dim, begin, end, step)
