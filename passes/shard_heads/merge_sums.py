"""One reduction for a sum of two: a + b of all ranks is the sum over ranks of each rank's a + b.

Blocks that compute attention and MLP side by side add up the results of both, mixtures those of their
experts, each times its weight, and of one that all tokens go to; embeddings of tokens, often times a number,
and of positions are added. So one reduction is enough. On the way to the sum a value may be moved, multiplied
by what every rank has, added to, and cast to a type that has all of its numbers. Where gradients flow, a
factor must be smaller than what is sent, because ranks add up the factor's gradient.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops.collectives import ALL_REDUCE
from attngraph.meaning import Category, Meaning
from attngraph.meaning.check.ranks import WayChecks
from attngraph.meaning.check.region import shape_at
from attngraph.meaning.placement.table import differing
from attngraph.passes.build import Builder, Refused
from attngraph.passes.proposal import Proposal
from attngraph.passes.shard import Entering

aten = torch.ops.aten


def merge_sums(graph: ProgramGraph, meaning: Meaning, entering: Entering) -> None:
    """Merge reductions whose results are added, where that is proved to give the same."""
    own = differing(graph)
    checks = WayChecks(graph, own, entering.learns)
    for node in list(graph.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        sides = [_summed(graph, meaning, own, value) for value in node.args]
        merged = [side for side in sides if side is not None]
        groups = {side.reduction.args[1] for side in merged}
        if len(merged) < 2 or len(groups) != 1 or node.args[0] is node.args[1]:
            continue
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
    if not isinstance(value, fx.Node) or not meaning.is_tensor(value) or len(value.users) != 1:
        return None
    if value.target is ALL_REDUCE:
        return _Summed(value)
    for before in _followed(graph, meaning, own, value):
        dtype = value.meta["val"].dtype
        if torch.promote_types(before.meta["val"].dtype, dtype) != dtype:
            continue  # it has not all numbers of the operand's
        found = _summed(graph, meaning, own, before)
        if found is not None:
            return _Summed(found.reduction, (*found.steps, (value, before)))
    return None


def _followed(graph: ProgramGraph, meaning: Meaning, own: set[fx.Node], value: fx.Node) -> Iterator[fx.Node]:
    """The operands of which a value may be the same sum over ranks."""
    tensors = [n for n in value.all_input_nodes if meaning.is_tensor(n)]
    if value.op != "call_function":
        return
    if meaning.category(value) is Category.MOVEMENT and len(tensors) == 1:
        yield tensors[0]
    if value.target not in (aten.add.Tensor, aten.mul.Tensor) or value.kwargs or len(value.args) != 2:
        return
    for before, other in (value.args, value.args[::-1]):
        if not isinstance(before, fx.Node) or before is other:
            continue
        if value.target is aten.mul.Tensor and isinstance(other, fx.Node):
            # Of a factor, ranks add up the gradient.
            factor, sent = (math.prod(shape_at(n.meta["val"], graph.hints)) for n in (other, before))
            if other in own or (graph.gradients and factor >= sent):
                continue
        yield before
