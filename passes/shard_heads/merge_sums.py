"""One reduction for a sum of two: a + b of all ranks is the sum over ranks of each rank's a + b.

Blocks that compute attention and MLP side by side add up the results of both, mixtures those of their
experts, each times its weight, and of one that all tokens go to; embeddings of tokens, often times a number,
and of positions are added. So one reduction is enough. On the way to the sum a value may be moved, multiplied
by what every rank has, added to, and cast to a type that has all of its numbers. Where gradients flow, a
factor must be smaller than what is sent, because ranks add up the factor's gradient.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops.collectives import ALL_REDUCE
from attngraph.meaning import Category, Meaning
from attngraph.meaning.check.ranks import WayChecks
from attngraph.meaning.check.region import shape_at
from attngraph.meaning.placement.table import differing
from attngraph.passes.build import Builder, Refused
from attngraph.passes.proposal import Proposal
from attngraph.passes.shard.entering import Entering

aten = torch.ops.aten


def merge_sums(graph: ProgramGraph, meaning: Meaning, entering: Entering) -> None:
    """Merge reductions whose results are added, where that is proved to give the same."""
    own = differing(graph)
    checks = WayChecks(graph, own, entering.learns)
    for node in list(graph.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        sides = [_summed(graph, meaning, own, value) for value in node.args]
        groups = {side.reduction.args[1] for side in sides if side is not None}
        if None in sides or len(groups) != 1 or node.args[0] is node.args[1]:
            continue
        merged = [side for side in sides if side is not None]
        with Proposal(graph, node, checks) as proposal:
            found = _merged(proposal, entering, merged, groups.pop())
            one, other = found.meta["val"], node.meta["val"]
            if list(map(str, one.shape)) != list(map(str, other.shape)) or one.dtype != other.dtype:
                raise Refused("the sum of what ranks add has another form")
            proposal.replace(node, found, [leaf for side in merged for leaf in side.begins()])
        if proposal.done:
            own = checks.own = differing(graph)
    graph.clean()


@dataclasses.dataclass(frozen=True)
class _Summed:
    """A reduction, and the operations that lead from it to a value, each with the operand followed."""

    reduction: fx.Node
    steps: tuple[tuple[fx.Node, fx.Node], ...] = ()

    def begins(self) -> list[fx.Node]:
        """What it is computed from."""
        others = [n for step, before in self.steps for n in step.all_input_nodes if n is not before]
        return [*self.reduction.all_input_nodes, *others]


def _merged(builder: Builder, entering: Entering, sides: list[_Summed], group: Any) -> fx.Node:
    """The sum over ranks of what a rank adds to both sides, and what is added to it afterwards."""
    parts, rests = [], list[Any]()
    for side in sides:
        part: Any = side.reduction.args[0]
        rest: Any = None
        for step, before in side.steps:
            if step.target is aten.add.Tensor:
                (added,) = [a for a in step.args if a is not before]
                rest = added if rest is None else builder.call(aten.add.Tensor, rest, added)
                continue
            others = {n: entering.enter(n) for n in step.all_input_nodes if n is not before}
            part = builder.again(step, {**others, before: part}.__getitem__)
            if rest is not None:
                rest = builder.again(step, {**{n: n for n in others}, before: rest}.__getitem__)
        parts.append(part)
        rests += [] if rest is None else [rest]
    found = builder.call(ALL_REDUCE, builder.call(aten.add.Tensor, *parts), group)
    for rest in rests:
        found = builder.call(aten.add.Tensor, found, rest)
    return found


def _summed(graph: ProgramGraph, meaning: Meaning, own: set[fx.Node], value: object) -> _Summed | None:
    """What a value is, if it is such a sum over ranks and nothing else uses it; else None."""
    steps: list[tuple[fx.Node, fx.Node]] = []
    while isinstance(value, fx.Node) and len(value.users) == 1:
        if value.target is ALL_REDUCE:
            return _Summed(value, tuple(reversed(steps)))
        before = _followed(graph, meaning, own, value)
        if before is None:
            return None
        steps.append((value, before))
        value = before
    return None


def _followed(
    graph: ProgramGraph, meaning: Meaning, own: set[fx.Node], value: fx.Node
) -> fx.Node | None:  # fmt: skip
    """The operand of which a value is the same sum over ranks; None if it is none."""
    tensors = [n for n in value.all_input_nodes if meaning.is_tensor(n)]
    if value.op != "call_function" or not meaning.is_tensor(value) or not tensors:
        return None
    if meaning.category(value) is Category.MOVEMENT and len(tensors) == 1:
        return tensors[0] if _is_exact(tensors[0], value) else None
    if value.target not in (aten.add.Tensor, aten.mul.Tensor) or value.kwargs or len(value.args) != 2:
        return None
    for before, other in (value.args, value.args[::-1]):
        if not isinstance(before, fx.Node) or before is other or not _leads_to_sum(meaning, before):
            continue
        if not _is_exact(before, value):
            continue
        if value.target is aten.add.Tensor or not isinstance(other, fx.Node):
            return before
        if other not in own and (not graph.gradients or _size(graph, other) < _size(graph, before)):
            return before
    return None


def _leads_to_sum(meaning: Meaning, node: fx.Node) -> bool:
    """Whether a value, used once, is a reduction, moved, multiplied or added to, on one way of several."""
    if len(node.users) != 1:
        return False
    while node.target is not ALL_REDUCE:
        ways = [n for n in node.all_input_nodes if meaning.is_tensor(n) and len(n.users) == 1]
        linear = node.target in (aten.add.Tensor, aten.mul.Tensor)
        if node.op != "call_function" or not (linear or meaning.category(node) is Category.MOVEMENT):
            return False
        summed = [n for n in ways if n.target is ALL_REDUCE] or ways
        if len(summed) != 1:
            return any(_leads_to_sum(meaning, n) for n in summed)
        (node,) = summed
    return len(node.users) == 1


def _is_exact(before: fx.Node, value: fx.Node) -> bool:
    """Whether a value's dtype has all numbers of an operand's."""
    one, other = before.meta["val"], value.meta["val"]
    return isinstance(other, Tensor) and torch.promote_types(one.dtype, other.dtype) == other.dtype


def _size(graph: ProgramGraph, node: fx.Node) -> int:
    return math.prod(shape_at(node.meta["val"], graph.hints))
